// SPDX-License-Identifier: Apache-2.0
#include "bindings/python_requests.h"

#include <cstdint>
#include <cstring>

namespace py = pybind11;

namespace penstock::bindings {

py::object indices_to_python(wire::IndexKind kind, std::span<const std::byte> body) {
  const auto integer = [&](size_t place) {
    int64_t value = 0;
    std::memcpy(&value, body.data() + place * sizeof value, sizeof value);
    return PyLong_FromLongLong(value);
  };
  switch (kind) {
    case wire::IndexKind::kInteger: return py::reinterpret_steal<py::object>(integer(0));
    case wire::IndexKind::kIntegers: {
      py::list list(body.size() / sizeof(int64_t));
      for (size_t place = 0; place < list.size(); ++place) {
        PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(place), integer(place));
      }
      return list;
    }
    case wire::IndexKind::kPickle: return py::bytes(reinterpret_cast<const char*>(body.data()), body.size());
    case wire::IndexKind::kNone: break;
  }
  return py::none();
}

}  // namespace penstock::bindings
