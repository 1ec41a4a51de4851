// SPDX-License-Identifier: Apache-2.0
#pragma once
// torch's default_collate, written directly into the slab if the result is the same object tree: exact dicts, tuples
// and lists of exact tensors, floats, integers, booleans, text, bytes, and numpy arrays and scalars. All other columns
// are passed to torch's default_collate, which also raises its errors.

#include <pybind11/pybind11.h>

#include "worker/slab_writer.h"

namespace penstock::bindings {

// `samples` is a list of at least one sample; `default_collate` is torch's.
pybind11::object collate(worker::SlabWriter& writer, const pybind11::list& samples,
                         const pybind11::object& default_collate);

}  // namespace penstock::bindings
