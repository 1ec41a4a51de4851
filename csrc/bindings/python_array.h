// SPDX-License-Identifier: Apache-2.0
#pragma once
// Numpy arrays and scalars: their conversion to and from their form in a nest, which is tensors, dtypes as text
// (wire/nest.h), and bytes; and columns of arrays, stacked as torch's default_collate does.

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "worker/slab_writer.h"

namespace penstock::bindings {

// An array in a nest.
struct ArrayParts {
  at::Tensor tensor;  // views the array's memory and keeps the array alive
  std::string dtype;  // empty if it is the tensor's dtype
};

// A numpy scalar in a nest.
struct ScalarParts {
  std::string dtype;
  std::string element;
};

// Whether `object` is exactly a numpy.ndarray, no subclass.
bool is_exact_array(pybind11::handle object);
bool is_array_scalar(pybind11::handle object);

// No value for unsupported dtypes: objects, structures, and dtypes that other packages add to numpy. An array that is
// in neither C nor Fortran order is copied first.
std::optional<ArrayParts> decompose_array(pybind11::handle object);
std::optional<ScalarParts> decompose_scalar(pybind11::handle scalar);

// A writable array that views the tensor's memory and keeps it alive; a copy if the tensor is on a device. The dtype
// must be one that the nest reader accepted. Raises PenstockError if the tensor does not fit it.
pybind11::object make_array(const at::Tensor& tensor, std::string_view dtype);
pybind11::object make_scalar(std::string_view dtype, std::string_view element);

// Whether `object` is a numpy array or memmap, of which torch's default_collate converts a column to tensors before it
// stacks them. Other subclasses do not count.
bool is_array_row(PyObject* object);

// Returns torch.stack of torch.as_tensor of each array of a column. Undefined unless all are such arrays, contiguous,
// with the same shape and the same dtype, which torch must have in the same bytes. Issues torch.as_tensor's warning
// about read-only arrays.
at::Tensor stack_arrays(worker::SlabWriter& writer, std::span<PyObject* const> arrays);

}  // namespace penstock::bindings
