// SPDX-License-Identifier: Apache-2.0
#pragma once
// A column of numpy arrays, which torch's default_collate converts to tensors before it stacks them.

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <span>

#include "worker/slab_writer.h"

namespace penstock::bindings {

// Whether `object` is a numpy array or memmap. Other subclasses do not count.
bool is_array_row(PyObject* object);

// Returns torch.stack of torch.as_tensor of each array. Undefined unless all are such arrays, contiguous, with the same
// shape and the same dtype, which torch must have in the same bytes. Issues torch.as_tensor's warning about read-only
// arrays.
at::Tensor stack_arrays(worker::SlabWriter& writer, std::span<PyObject* const> arrays);

}  // namespace penstock::bindings
