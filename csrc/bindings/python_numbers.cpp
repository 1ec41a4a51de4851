// SPDX-License-Identifier: Apache-2.0
#include "bindings/python_numbers.h"

#include <algorithm>
#include <string_view>
#include <utility>

namespace py = pybind11;

namespace penstock::bindings {
namespace {

using Read = NumberKind::Read;

constexpr NumberKind of_numpy(at::ScalarType dtype, Read read) {
  return {.type = nullptr, .dtype = dtype, .read = read};
}

// torch.as_tensor of a list gives these types the dtypes of the same names.
constexpr std::pair<const char*, NumberKind> kNumpyKinds[] = {
    {"float64", of_numpy(at::kDouble, Read::kFloat)}, {"float32", of_numpy(at::kFloat, Read::kFloat)},
    {"int64", of_numpy(at::kLong, Read::kInteger)},   {"int32", of_numpy(at::kInt, Read::kInteger)},
    {"int16", of_numpy(at::kShort, Read::kInteger)},  {"int8", of_numpy(at::kChar, Read::kInteger)},
    {"uint8", of_numpy(at::kByte, Read::kInteger)},   {"bool_", of_numpy(at::kBool, Read::kTruth)}};

}  // namespace

std::optional<NumberKind> NumberKinds::find(PyObject* object) {
  PyTypeObject* const type = Py_TYPE(object);
  if (type == &PyFloat_Type) return NumberKind{.type = type, .dtype = at::kDouble, .read = Read::kFloat};
  if (type == &PyLong_Type) return NumberKind{.type = type, .dtype = at::kLong, .read = Read::kInteger};
  if (type == &PyBool_Type) return NumberKind{.type = type, .dtype = at::kBool, .read = Read::kTruth};
  if (!std::string_view(type->tp_name).starts_with("numpy.")) return std::nullopt;
  if (of_numpy_.empty()) {
    const auto numpy = py::module_::import("numpy");
    for (auto [name, kind] : kNumpyKinds) {
      kind.type = reinterpret_cast<PyTypeObject*>(numpy.attr(name).ptr());  // numpy's types live as long as the process
      of_numpy_.push_back(kind);
    }
  }
  const auto found = std::ranges::find(of_numpy_, type, &NumberKind::type);
  return found == of_numpy_.end() ? std::nullopt : std::optional(*found);
}

bool read_number(const NumberKind& kind, PyObject* object, worker::Number& number) {
  if (Py_TYPE(object) != kind.type) return false;
  switch (kind.read) {
    case Read::kFloat: number.floating = PyFloat_AsDouble(object); break;
    case Read::kInteger: {
      int overflow = 0;
      number.integer = PyLong_AsLongLongAndOverflow(object, &overflow);
      if (overflow != 0) return false;
      break;
    }
    case Read::kTruth: number.integer = PyObject_IsTrue(object); break;
  }
  return true;
}

}  // namespace penstock::bindings
