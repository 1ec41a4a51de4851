// SPDX-License-Identifier: Apache-2.0
#include "bindings/python_collate.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <vector>

#include "bindings/python_nest.h"
#include "worker/stack.h"

namespace py = pybind11;

namespace penstock::bindings {
namespace {

// One column at a time, as torch does. `samples` is a list or a tuple, as torch would have it at this place, because a
// column of text is returned as it is.
class Collator {
 public:
  Collator(worker::SlabWriter& writer, const py::object& default_collate)
      : writer_(writer), default_collate_(default_collate) {}

  py::object collate(const py::object& samples) {
    PyObject* first = item(samples, 0);
    at::Tensor batch;
    if (PyUnicode_CheckExact(first) || PyBytes_CheckExact(first)) return samples;
    if (is_exact_tensor(first)) {
      batch = stack_tensors(samples);
    } else if (PyFloat_CheckExact(first)) {
      batch = stack_floats(samples);
    } else if (PyLong_CheckExact(first)) {
      batch = stack_integers(samples);
    } else if (PyBool_Check(first)) {
      batch = stack_booleans(samples);
    } else if (PyDict_CheckExact(first)) {
      if (auto dict = collate_dicts(samples)) return dict;
    } else if (PyTuple_CheckExact(first)) {
      if (auto list = collate_sequences<is_tuple>(samples)) return list;
    } else if (PyList_CheckExact(first)) {
      if (auto list = collate_sequences<is_list>(samples)) return list;
    }
    return batch.defined() ? wrap_tensor(batch) : default_collate_(samples);
  }

 private:
  static bool is_tuple(PyObject* object) { return PyTuple_CheckExact(object); }
  static bool is_list(PyObject* object) { return PyList_CheckExact(object); }

  static Py_ssize_t size(const py::object& samples) { return PySequence_Fast_GET_SIZE(samples.ptr()); }
  static PyObject* item(const py::object& samples, Py_ssize_t index) {
    return PySequence_Fast_GET_ITEM(samples.ptr(), index);
  }

  at::Tensor stack_tensors(const py::object& samples) {
    std::vector<at::Tensor> tensors;
    tensors.reserve(static_cast<size_t>(size(samples)));
    for (Py_ssize_t index = 0; index < size(samples); ++index) {
      if (!is_exact_tensor(item(samples, index))) return {};
      tensors.push_back(THPVariable_Unpack(item(samples, index)));
    }
    return worker::stack_samples(writer_, tensors);
  }

  at::Tensor stack_floats(const py::object& samples) {
    std::vector<double> numbers(static_cast<size_t>(size(samples)));
    for (size_t index = 0; index < numbers.size(); ++index) {
      PyObject* number = item(samples, static_cast<Py_ssize_t>(index));
      if (!PyFloat_CheckExact(number)) return {};
      numbers[index] = PyFloat_AS_DOUBLE(number);
    }
    return worker::stack_numbers(writer_, numbers);
  }

  at::Tensor stack_integers(const py::object& samples) {
    std::vector<int64_t> numbers(static_cast<size_t>(size(samples)));
    for (size_t index = 0; index < numbers.size(); ++index) {
      PyObject* number = item(samples, static_cast<Py_ssize_t>(index));
      int overflow = 0;
      if (!PyLong_CheckExact(number)) return {};
      numbers[index] = PyLong_AsLongLongAndOverflow(number, &overflow);
      if (overflow != 0) return {};
    }
    return worker::stack_numbers(writer_, numbers);
  }

  at::Tensor stack_booleans(const py::object& samples) {
    std::vector<uint8_t> booleans(static_cast<size_t>(size(samples)));
    for (size_t index = 0; index < booleans.size(); ++index) {
      PyObject* boolean = item(samples, static_cast<Py_ssize_t>(index));
      if (!PyBool_Check(boolean)) return {};
      booleans[index] = boolean == Py_True ? 1 : 0;
    }
    return worker::stack_booleans(writer_, booleans);
  }

  // A dict with the first sample's keys in its order; a null object when torch's code has to decide.
  py::object collate_dicts(const py::object& samples) {
    const Py_ssize_t count = size(samples);
    for (Py_ssize_t index = 0; index < count; ++index) {
      if (!PyDict_CheckExact(item(samples, index))) return {};
    }
    const auto keys = py::reinterpret_steal<py::list>(PyDict_Keys(item(samples, 0)));
    py::dict result;
    for (py::handle key : keys) {
      py::list column(static_cast<size_t>(count));
      for (Py_ssize_t index = 0; index < count; ++index) {
        PyObject* value = PyDict_GetItemWithError(item(samples, index), key.ptr());
        if (value == nullptr) {
          PyErr_Clear();
          return {};
        }
        PyList_SET_ITEM(column.ptr(), index, Py_NewRef(value));
      }
      result[key] = collate(column);
    }
    return result;
  }

  // A list with one entry for each place of the samples; a null object when torch's code has to decide.
  template <bool (*is_kind)(PyObject*)>
  py::object collate_sequences(const py::object& samples) {
    const Py_ssize_t count = size(samples);
    const Py_ssize_t width = PySequence_Fast_GET_SIZE(item(samples, 0));
    for (Py_ssize_t index = 0; index < count; ++index) {
      if (!is_kind(item(samples, index)) || PySequence_Fast_GET_SIZE(item(samples, index)) != width) return {};
    }
    py::list result(static_cast<size_t>(width));
    for (Py_ssize_t place = 0; place < width; ++place) {
      py::tuple column(static_cast<size_t>(count));
      for (Py_ssize_t index = 0; index < count; ++index) {
        PyTuple_SET_ITEM(column.ptr(), index, Py_NewRef(PySequence_Fast_GET_ITEM(item(samples, index), place)));
      }
      PyList_SET_ITEM(result.ptr(), place, collate(column).release().ptr());
    }
    return result;
  }

  worker::SlabWriter& writer_;
  const py::object& default_collate_;
};

}  // namespace

py::object collate(worker::SlabWriter& writer, const py::list& samples, const py::object& default_collate) {
  if (samples.empty()) return default_collate(samples);
  return Collator(writer, default_collate).collate(samples);
}

}  // namespace penstock::bindings
