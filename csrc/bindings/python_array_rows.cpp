// SPDX-License-Identifier: Apache-2.0
#include "bindings/python_array_rows.h"

#include <pybind11/numpy.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "worker/stack.h"

namespace py = pybind11;

namespace penstock::bindings {
namespace {

constexpr std::pair<const char*, at::ScalarType> kDtypes[] = {{"bool", at::kBool},
                                                              {"int8", at::kChar},
                                                              {"uint8", at::kByte},
                                                              {"int16", at::kShort},
                                                              {"int32", at::kInt},
                                                              {"int64", at::kLong},
                                                              {"float16", at::kHalf},
                                                              {"float32", at::kFloat},
                                                              {"float64", at::kDouble},
                                                              {"complex64", at::kComplexFloat},
                                                              {"complex128", at::kComplexDouble}};

// numpy has a single object for each builtin dtype in native byte order.
std::optional<at::ScalarType> torch_dtype(const py::dtype& dtype) {
  const py::object make = py::module_::import("numpy").attr("dtype");
  for (const auto& [name, torch_type] : kDtypes) {
    if (make(name).is(dtype)) return torch_type;
  }
  return std::nullopt;
}

bool has_same_shape(const py::array& array, const py::array& first) {
  return array.ndim() == first.ndim() && std::equal(array.shape(), array.shape() + array.ndim(), first.shape());
}

// A dimension of one element may have any stride, and torch.as_tensor rejects some strides.
bool is_contiguous(const py::array& array) {
  return (array.flags() & py::array::c_style) != 0 &&
         std::all_of(array.strides(), array.strides() + array.ndim(),
                     [&](py::ssize_t stride) { return stride >= 0 && stride % array.itemsize() == 0; });
}

}  // namespace

bool is_array_row(PyObject* object) {
  const std::string_view name = Py_TYPE(object)->tp_name;
  if (name == "numpy.ndarray") return py::type::handle_of(object).is(py::module_::import("numpy").attr("ndarray"));
  return name == "memmap" && py::type::handle_of(object).is(py::module_::import("numpy").attr("memmap"));
}

at::Tensor stack_arrays(worker::SlabWriter& writer, std::span<PyObject* const> arrays) {
  const auto first = py::reinterpret_borrow<py::array>(arrays.front());
  const py::dtype dtype = first.dtype();
  const auto torch_type = torch_dtype(dtype);
  if (!torch_type) return {};
  bool is_read_only = false;
  std::vector<const void*> rows;
  rows.reserve(arrays.size());
  for (PyObject* object : arrays) {
    if (Py_TYPE(object) != Py_TYPE(arrays.front())) return {};
    const auto array = py::reinterpret_borrow<py::array>(object);
    if (!array.dtype().is(dtype) || !is_contiguous(array) || !has_same_shape(array, first)) return {};
    is_read_only = is_read_only || !array.writeable();
    rows.push_back(array.data());
  }
  if (is_read_only) {
    const auto as_tensor = py::module_::import("torch").attr("as_tensor");
    const auto reads_only = [](PyObject* object) { return !py::reinterpret_borrow<py::array>(object).writeable(); };
    as_tensor(py::handle(*std::ranges::find_if(arrays, reads_only)));
  }
  const std::vector<int64_t> sizes(first.shape(), first.shape() + first.ndim());
  return worker::stack_rows(writer, rows, sizes, *torch_type);
}

}  // namespace penstock::bindings
