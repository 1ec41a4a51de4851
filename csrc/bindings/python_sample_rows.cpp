// SPDX-License-Identifier: Apache-2.0
#include "bindings/python_sample_rows.h"

#include <torch/csrc/autograd/python_variable.h>

#include "base/live_clock.h"
#include "bindings/python_nest.h"

namespace py = pybind11;

namespace penstock::bindings {

py::object PythonSampleRows::fetch(py::handle dataset, py::handle index) {
  const Instant begun_at = clock_now();
  auto sample = py::reinterpret_steal<py::object>(PyObject_GetItem(dataset.ptr(), index.ptr()));
  if (!sample) throw py::error_already_set();
  const Instant fetched_at = clock_now();
  clock_.note_sample(fetched_at - begun_at);
  rows_.begin_sample();
  auto row = moved(sample.ptr());
  clock_.note_copy(clock_now() - fetched_at);
  return row ? row : sample;
}

// The replacement for `value`, which has one reference left; null if it stays. A container without other references is
// changed in place.
py::object PythonSampleRows::moved(PyObject* value) {
  if (Py_REFCNT(value) != 1) return {};
  if (is_exact_tensor(value)) {
    const at::Tensor row = rows_.take(THPVariable_Unpack(value));
    return row.defined() ? wrap_tensor(row) : py::object();
  }
  if (PyTuple_CheckExact(value)) {
    for (Py_ssize_t place = 0; place < PyTuple_GET_SIZE(value); ++place) {
      auto row = moved(PyTuple_GET_ITEM(value, place));
      if (row && PyTuple_SetItem(value, place, row.release().ptr()) != 0) throw py::error_already_set();
    }
  } else if (PyList_CheckExact(value)) {
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(value); ++place) {
      auto row = moved(PyList_GET_ITEM(value, place));
      if (row && PyList_SetItem(value, place, row.release().ptr()) != 0) throw py::error_already_set();
    }
  } else if (PyDict_CheckExact(value)) {
    Py_ssize_t position = 0;
    PyObject* key = nullptr;
    PyObject* item = nullptr;
    while (PyDict_Next(value, &position, &key, &item) != 0) {
      auto row = moved(item);
      // The key exists already: the dict keeps its order, and PyDict_Next()'s position stays valid.
      if (row && PyDict_SetItem(value, key, row.ptr()) != 0) throw py::error_already_set();
    }
  }
  return {};
}

}  // namespace penstock::bindings
