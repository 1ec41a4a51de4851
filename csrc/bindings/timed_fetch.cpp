// SPDX-License-Identifier: Apache-2.0
#include "bindings/timed_fetch.h"

#include <chrono>

#include "base/live_clock.h"

namespace py = pybind11;

namespace penstock::bindings {
namespace {

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
  py::class_<TimedSamples>(module, "TimedSamples")
      .def(py::init<py::object, FetchClock&>(), py::arg("dataset"), py::arg("clock"), py::keep_alive<1, 3>())
      .def("__getitem__", &TimedSamples::get, py::arg("index"));
  py::class_<TimedCollate>(module, "TimedCollate")
      .def(py::init<py::object, FetchClock&, bool>(), py::arg("collate_fn"), py::arg("clock"), py::arg("draws_nothing"),
           py::keep_alive<1, 3>())
      .def("__call__", &TimedCollate::call, py::arg("samples"))
      .def_property_readonly("draws_nothing", &TimedCollate::draws_nothing);
}

}  // namespace penstock::bindings
