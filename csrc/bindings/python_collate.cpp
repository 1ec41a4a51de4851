// SPDX-License-Identifier: Apache-2.0
#include "bindings/python_collate.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <chrono>
#include <span>
#include <vector>

#include "base/clock.h"
#include "bindings/python_array.h"
#include "bindings/python_nest.h"
#include "bindings/python_rows.h"
#include "worker/stack.h"

namespace py = pybind11;

namespace penstock::bindings {
namespace {

// Collates one list of samples, and their columns. `samples` is a list or a tuple, as in torch's code at this point,
// because a column of text is returned as it is.
class Collator {
 public:
  Collator(worker::SlabWriter& writer, const py::object& default_collate)
      : writer_(writer), default_collate_(default_collate) {}

  py::object collate(const py::object& samples) {
    PyObject* first = items(samples).front();
    at::Tensor batch;
    if (PyUnicode_CheckExact(first) || PyBytes_CheckExact(first)) return samples;
    if (is_exact_tensor(first)) {
      batch = stack_tensors(samples);
    } else if (PyDict_CheckExact(first)) {
      if (auto dict = collate_dicts(samples)) return dict;
    } else if (PyTuple_CheckExact(first)) {
      if (auto list = collate_sequences<is_tuple>(samples)) return list;
    } else if (PyList_CheckExact(first)) {
      if (auto list = collate_sequences<is_list>(samples)) return list;
    } else if (const auto kind = kinds_.find(first)) {
      batch = stack_numbers(samples, *kind);
    } else if (is_array_row(first)) {
      batch = stack_arrays(writer_, items(samples));
    }
    return batch.defined() ? wrap_tensor(batch) : default_collate_(samples);
  }

 private:
  // The outcome of an attempt to split all samples into columns.
  enum class Taken { kAll, kOtherNumber, kOtherShape };

  static bool is_tuple(PyObject* object) { return PyTuple_CheckExact(object); }
  static bool is_list(PyObject* object) { return PyList_CheckExact(object); }

  static std::span<PyObject* const> items(const py::object& samples) {
    return {PySequence_Fast_ITEMS(samples.ptr()), static_cast<size_t>(PySequence_Fast_GET_SIZE(samples.ptr()))};
  }

  at::Tensor stack_tensors(const py::object& samples) {
    std::vector<at::Tensor> tensors;
    tensors.reserve(items(samples).size());
    for (PyObject* sample : items(samples)) {
      if (!is_exact_tensor(sample)) return {};
      tensors.push_back(THPVariable_Unpack(sample));
    }
    return worker::stack_samples(writer_, tensors);
  }

  at::Tensor stack_numbers(const py::object& samples, const NumberKind& kind) {
    std::vector<worker::Number> numbers;
    numbers.reserve(items(samples).size());
    for (PyObject* sample : items(samples)) {
      worker::Number number{};
      if (!read_number(kind, sample, number)) return {};
      numbers.push_back(number);
    }
    return worker::stack_numbers(writer_, numbers, kind.dtype);
  }

  // A dict with the first sample's keys in its order; a null object if torch's code must handle the samples.
  py::object collate_dicts(const py::object& samples) {
    if (!std::ranges::all_of(items(samples), [](PyObject* sample) { return PyDict_CheckExact(sample); })) return {};
    const auto keys = py::reinterpret_steal<py::list>(PyDict_Keys(items(samples).front()));
    const auto values = py::reinterpret_steal<py::list>(PyDict_Values(items(samples).front()));
    for (const bool takes_numbers : {true, false}) {
      PythonRows rows(kinds_, items(values), items(samples).size(), PythonRows::Columns::kLists, takes_numbers);
      switch (take_dicts(samples, items(keys), rows)) {
        case Taken::kOtherShape: return {};
        case Taken::kOtherNumber: continue;
        case Taken::kAll: break;
      }
      py::dict result;
      for (size_t place = 0; place < rows.column_count(); ++place) result[keys[place]] = collate_column(rows, place);
      return result;
    }
    return {};
  }

  static Taken take_dicts(const py::object& samples, std::span<PyObject* const> keys, PythonRows& rows) {
    for (PyObject* sample : items(samples)) {
      // Nearly always all samples have the same keys in the same order.
      Py_ssize_t position = 0;
      PyObject* key = nullptr;
      PyObject* value = nullptr;
      bool is_in_order = true;
      for (size_t place = 0; place < keys.size(); ++place) {
        is_in_order = is_in_order && PyDict_Next(sample, &position, &key, &value) != 0 && key == keys[place];
        if (!is_in_order) value = PyDict_GetItemWithError(sample, keys[place]);
        if (value == nullptr) {
          PyErr_Clear();
          return Taken::kOtherShape;
        }
        if (!rows.put(place, value)) return Taken::kOtherNumber;
      }
      rows.end_row();
    }
    return Taken::kAll;
  }

  // A list with one entry per position in the samples; a null object if torch's code must handle the samples.
  template <bool (*is_kind)(PyObject*)>
  py::object collate_sequences(const py::object& samples) {
    const auto fields_of = [](PyObject* sample) {
      return std::span<PyObject* const>(PySequence_Fast_ITEMS(sample),
                                        static_cast<size_t>(PySequence_Fast_GET_SIZE(sample)));
    };
    const auto first = fields_of(items(samples).front());
    for (PyObject* sample : items(samples)) {
      if (!is_kind(sample) || fields_of(sample).size() != first.size()) return {};
    }
    for (const bool takes_numbers : {true, false}) {
      PythonRows rows(kinds_, first, items(samples).size(), PythonRows::Columns::kTuples, takes_numbers);
      const bool are_taken = std::ranges::all_of(items(samples), [&](PyObject* sample) {
        for (size_t place = 0; place < rows.column_count(); ++place) {
          if (!rows.put(place, fields_of(sample)[place])) return false;
        }
        rows.end_row();
        return true;
      });
      if (!are_taken) continue;
      py::list result(rows.column_count());
      for (size_t place = 0; place < rows.column_count(); ++place) {
        PyList_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(place), collate_column(rows, place).release().ptr());
      }
      return result;
    }
    return {};
  }

  py::object collate_column(const PythonRows& rows, size_t place) {
    const auto dtype = rows.dtype(place);
    if (!dtype) return collate(rows.objects(place));
    return wrap_tensor(worker::stack_numbers(writer_, rows.numbers(place), *dtype));
  }

  worker::SlabWriter& writer_;
  const py::object& default_collate_;
  NumberKinds kinds_;
};

}  // namespace

py::object collate(worker::SlabWriter& writer, const py::list& samples, const py::object& default_collate) {
  writer.clock().begin_collate(clock_now());
  if (samples.empty()) return default_collate(samples);
  return Collator(writer, default_collate).collate(samples);
}

namespace {

// The object held by `self`; null before it is constructed.
template <typename Timed>
py::object* held_by(PyObject* self) {
  auto* const instance = reinterpret_cast<py::detail::instance*>(self);
  if (!instance->get_value_and_holder().holder_constructed()) return nullptr;
  return &py::cast<Timed&>(py::handle(self)).held();
}

// Supports the garbage collector for classes defined here.
template <typename Timed>
py::custom_type_setup collected() {
  return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    PyTypeObject& type = heap_type->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      if (const py::object* held = held_by<Timed>(self)) Py_VISIT(held->ptr());
      return 0;
    };
    type.tp_clear = [](PyObject* self) {
      if (py::object* held = held_by<Timed>(self)) *held = py::object();
      return 0;
    };
  });
}

double seconds(Duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

py::object TimedSamples::get(py::handle index) {
  const Instant begun_at = clock_now();
  auto sample = py::reinterpret_steal<py::object>(PyObject_GetItem(dataset_.ptr(), index.ptr()));
  if (!sample) throw py::error_already_set();
  clock_.note_sample(clock_now() - begun_at);
  return sample;
}

py::object TimedCollate::call(py::handle samples) {
  clock_.begin_collate(clock_now());
  auto batch = py::reinterpret_steal<py::object>(PyObject_CallOneArg(collate_fn_.ptr(), samples.ptr()));
  if (!batch) throw py::error_already_set();
  return batch;
}

void bind_timed_fetch(py::module_& module) {
  using dataset::FetchClock;
  py::class_<FetchClock>(module, "FetchClock")
      .def(py::init<>())
      .def("begin", [](FetchClock& self) { self.begin(clock_now()); })
      .def("times", [](const FetchClock& self) {
        const auto times = self.times(self.begun_at(), clock_now());
        return py::make_tuple(seconds(times.dataset), seconds(times.slowest), times.slowest_place);
      });
  py::class_<TimedSamples>(module, "TimedSamples", collected<TimedSamples>())
      .def(py::init<py::object, FetchClock&>(), py::arg("dataset"), py::arg("clock"), py::keep_alive<1, 3>())
      .def("__getitem__", &TimedSamples::get, py::arg("index"));
  py::class_<TimedCollate>(module, "TimedCollate", collected<TimedCollate>())
      .def(py::init<py::object, FetchClock&, bool>(), py::arg("collate_fn"), py::arg("clock"), py::arg("draws_nothing"),
           py::keep_alive<1, 3>())
      .def("__call__", &TimedCollate::call, py::arg("samples"))
      .def_property_readonly("draws_nothing", &TimedCollate::draws_nothing);
}

}  // namespace penstock::bindings
