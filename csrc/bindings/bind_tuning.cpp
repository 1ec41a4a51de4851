// SPDX-License-Identifier: Apache-2.0
// The Python view of how a loader chooses its number of workers.
#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <string>
#include <utility>

#include "bindings/raise.h"
#include "scheduling/worker_choice.h"

namespace py = pybind11;

namespace penstock::bindings {

using scheduling::BatchCounts;
using scheduling::MeasuredWork;
using scheduling::StallMeter;
using scheduling::TuningHistory;
using scheduling::WorkerChoice;
using scheduling::WorkerLimits;
using scheduling::WorkerTuner;

namespace {

const char* reason_name(const WorkerChoice& choice) {
  static constexpr std::array kNames{"stalled",    "settled",   "limit", "no gain",
                                     "taken back", "part gain", "idle",  "times"};
  return kNames.at(static_cast<size_t>(choice.reason));
}

const char* limit_name(const WorkerChoice& choice) {
  static constexpr std::array kNames{"CPUs", "shards", "cap", "pool"};
  return kNames.at(static_cast<size_t>(choice.limited_by));
}

BatchCounts counts_of(const py::dict& counters) {
  return {.batches = counters["batches"].cast<uint64_t>(),
          .ready = counters["ready"].cast<uint64_t>(),
          .wait_s = counters["wait_s"].cast<double>(),
          .fetch_s = counters["fetch_s"].cast<double>()};
}

}  // namespace

void bind_tuning(py::module_& module) {
  py::class_<MeasuredWork>(module, "MeasuredWork")
      .def(py::init([](uint32_t workers, double wait_s, double trainer_s, double worker_s,
                       std::optional<double> cpu_share, double trainer_cpus) {
             return MeasuredWork{.workers = workers,
                                 .wait_s = wait_s,
                                 .trainer_s = trainer_s,
                                 .worker_s = worker_s,
                                 .cpu_share = cpu_share,
                                 .trainer_cpus = trainer_cpus};
           }),
           py::arg("workers"), py::arg("wait_s"), py::arg("trainer_s"), py::arg("worker_s"), py::arg("cpu_share"),
           py::arg("trainer_cpus"))
      .def_readonly("workers", &MeasuredWork::workers)
      .def_readonly("wait_s", &MeasuredWork::wait_s)
      .def_readonly("trainer_s", &MeasuredWork::trainer_s)
      .def_readonly("worker_s", &MeasuredWork::worker_s)
      .def_readonly("cpu_share", &MeasuredWork::cpu_share)
      .def_readonly("trainer_cpus", &MeasuredWork::trainer_cpus)
      .def_property_readonly("stalled_share", &MeasuredWork::stalled_share)
      .def_property_readonly("idle_share", &MeasuredWork::idle_share)
      .def(py::self == py::self);  // NOLINT(misc-redundant-expression): pybind11 makes an operator of it
  py::class_<WorkerLimits>(module, "WorkerLimits")
      .def(py::init(&WorkerLimits::of), py::arg("cpus"), py::arg("shards") = py::none())
      .def_readonly("cpus", &WorkerLimits::cpus)
      .def_readonly("waiting_workers", &WorkerLimits::waiting_workers)
      .def_readonly("shards", &WorkerLimits::shards)
      .def_property_readonly("first_workers", &WorkerLimits::first_workers);
  py::class_<WorkerChoice>(module, "WorkerChoice")
      .def_readonly("workers", &WorkerChoice::workers)
      .def_property_readonly("reason", &reason_name)
      .def_readonly("measured", &WorkerChoice::measured)
      .def_readonly("limit", &WorkerChoice::limit)
      .def_property_readonly("limited_by", &limit_name)
      .def_readonly("cpus", &WorkerChoice::cpus)
      .def_readonly("fewer", &WorkerChoice::fewer)
      .def("__str__", &WorkerChoice::text)
      .def(py::self == py::self);  // NOLINT(misc-redundant-expression): pybind11 makes an operator of it
  py::class_<TuningHistory>(module, "WorkerLessons").def(py::init<>());
  module.def(
      "choose_workers",
      [](const MeasuredWork& measured, const WorkerLimits& limits, const TuningHistory& lessons) {
        return scheduling::choose_workers(measured, limits, lessons);
      },
      py::arg("measured"), py::arg("limits"), py::arg("lessons"));
  py::class_<StallMeter>(module, "StallMeter")
      .def(
          "begin",
          [](StallMeter& self, uint64_t owner, uint32_t workers, const py::dict& counters,
             std::optional<double> workers_cpu_s, double trainer_cpu_s, double now_s) {
            self.begin(owner, workers, counts_of(counters), {.workers_s = workers_cpu_s, .trainer_s = trainer_cpu_s},
                       now_s);
          },
          py::arg("owner"), py::arg("workers"), py::arg("counters"), py::arg("workers_cpu_s"), py::arg("trainer_cpu_s"),
          py::arg("now_s"))
      .def("is_open", &StallMeter::is_open, py::arg("owner"))
      .def("note", &StallMeter::note, py::arg("called_at_s"), py::arg("returned_at_s"))
      .def(
          "end",
          [](StallMeter& self, const py::dict& counters, std::optional<double> workers_cpu_s, double trainer_cpu_s) {
            self.end(counts_of(counters), {.workers_s = workers_cpu_s, .trainer_s = trainer_cpu_s});
          },
          py::arg("counters"), py::arg("workers_cpu_s"), py::arg("trainer_cpu_s"))
      .def("has_seen", &StallMeter::has_seen, py::arg("seconds"), py::arg("batches"))
      .def("take", &StallMeter::take)
      .def_property_readonly("kept_count", &StallMeter::kept_count);
  py::class_<WorkerTuner>(module, "WorkerTuner")
      .def(py::init<double>(), py::arg("window_s"))
      .def_property_readonly("meter", &WorkerTuner::meter, py::return_value_policy::reference_internal)
      .def("is_due", &WorkerTuner::is_due, py::arg("workers"))
      .def(
          "choose", [](WorkerTuner& self, const WorkerLimits& limits) { return WorkerChoice(self.choose(limits)); },
          py::arg("limits"))
      .def("give_up", &WorkerTuner::give_up, py::arg("workers_before"));
}

}  // namespace penstock::bindings
