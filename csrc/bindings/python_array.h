// SPDX-License-Identifier: Apache-2.0
#pragma once
// Conversion between numpy arrays and scalars and their form in a nest: tensors, dtypes as text (wire/array_dtype.h),
// and bytes.

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>
#include <string_view>

namespace penstock::bindings {

struct ArrayParts {
  at::Tensor tensor;  // views the array's memory and keeps the array alive
  std::string dtype;  // empty if it is the tensor's dtype
};

struct ScalarParts {
  std::string dtype;
  std::string element;
};

// Whether `object` is exactly a numpy.ndarray, no subclass.
bool is_exact_array(pybind11::handle object);
bool is_array_scalar(pybind11::handle object);

// No value for unsupported dtypes: objects, structures, and dtypes that other packages add to numpy. An array that is
// in neither C nor Fortran order is copied first.
std::optional<ArrayParts> take_array_apart(pybind11::handle object);
std::optional<ScalarParts> take_scalar_apart(pybind11::handle scalar);

// A writable array that views the tensor's memory and keeps it alive; a copy if the tensor is on a device. The dtype
// must be one that the nest reader accepted. Raises PenstockError if the tensor does not fit it.
pybind11::object make_array(const at::Tensor& tensor, std::string_view dtype);
pybind11::object make_scalar(std::string_view dtype, std::string_view element);

}  // namespace penstock::bindings
