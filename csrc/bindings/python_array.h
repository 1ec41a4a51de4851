// SPDX-License-Identifier: Apache-2.0
#pragma once
// Translation between numpy's arrays and scalars and their form in a nest: tensors, dtypes as text
// (wire/array_dtype.h), and bytes.

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <string_view>

namespace penstock::bindings {

struct ArrayParts {
  at::Tensor tensor;  // views the array's memory and keeps the array alive
  std::string dtype;  // empty when it is the tensor's own
};

struct ScalarParts {
  std::string dtype;
  std::string element;
};

// Whether `object` is exactly a numpy.ndarray, no subclass.
bool is_exact_array(pybind11::handle object);
bool is_array_scalar(pybind11::handle object);

// Nothing for a dtype that does not travel: objects, structures, and those that other packages add to numpy. An array
// that lies in neither C's nor Fortran's order is copied first.
std::optional<ArrayParts> take_array_apart(pybind11::handle object);
std::optional<ScalarParts> take_scalar_apart(pybind11::handle scalar);

// A writable array that views the tensor's memory and keeps it alive; a copy if the tensor lies on a device. The dtype
// is one that the reader of nests let through. Raises PenstockError when the tensor does not fit it.
pybind11::object make_array(const at::Tensor& tensor, std::string_view dtype);
pybind11::object make_scalar(std::string_view dtype, std::string_view element);

}  // namespace penstock::bindings
