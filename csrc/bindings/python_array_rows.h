// SPDX-License-Identifier: Apache-2.0
#pragma once
// A column of numpy's arrays, of which torch's default_collate makes a tensor each before it stacks them.

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <span>

#include "worker/slab_writer.h"

namespace penstock::bindings {

// Whether `object` is an array of numpy, or one that is mapped from a file. Children of these are not.
bool is_array_row(PyObject* object);

// torch.stack of torch.as_tensor of each. Undefined unless all are such arrays, contiguous, of one shape and of one
// dtype that torch has in the same bytes. torch.as_tensor's warning about arrays that cannot be written to is given.
at::Tensor stack_arrays(worker::SlabWriter& writer, std::span<PyObject* const> arrays);

}  // namespace penstock::bindings
