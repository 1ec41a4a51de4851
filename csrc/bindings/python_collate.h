// SPDX-License-Identifier: Apache-2.0
#pragma once
// torch's default_collate, written straight into the slab where the result is the same object tree: exact dicts, tuples
// and lists of exact tensors, floats, integers, booleans, text, bytes, and numpy's arrays and scalars. Every column
// that is anything else goes to torch's own default_collate, which also raises its own errors.

#include <pybind11/pybind11.h>

#include "worker/slab_writer.h"

namespace penstock::bindings {

// `samples` is a list of at least one sample; `default_collate` is torch's.
pybind11::object collate(worker::SlabWriter& writer, const pybind11::list& samples,
                         const pybind11::object& default_collate);

}  // namespace penstock::bindings
