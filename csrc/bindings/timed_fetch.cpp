// SPDX-License-Identifier: Apache-2.0
#include "bindings/timed_fetch.h"

#include <chrono>

#include "base/live_clock.h"

namespace py = pybind11;

namespace penstock::bindings {
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
