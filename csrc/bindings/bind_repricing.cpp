// SPDX-License-Identifier: Apache-2.0
// The Python view of the plans of one graph, and of pricing them again while a loader runs.

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/raise.h"
#include "graph/load_meter.h"
#include "graph/priced_cut.h"
#include "graph/priced_plans.h"
#include "graph/repricer.h"

namespace penstock::bindings {

namespace py = pybind11;

namespace {

using graph::GraphPricing;
using graph::LoadMeter;
using graph::MeasuredLoads;
using graph::PricedCut;
using graph::PricedPlans;
using graph::Repricer;
using graph::ShownPrice;
using graph::TimedCall;

std::shared_ptr<PricedPlans> make_plans(graph::Graph graph, std::vector<graph::Verdict> verdicts,
                                        graph::Calibration calibration, const std::string& cut,
                                        const graph::Prices& prices) {
  return std::make_shared<PricedPlans>(unwrap(PricedPlans::make(
      std::move(graph), std::move(verdicts), std::move(calibration), prices, unwrap(graph::cut_mode_from_name(cut)))));
}

std::optional<std::string> next_timed_call(PricedCut& cut) {
  const std::optional<TimedCall> call = cut.pricing->next_timed_call();
  if (!call) return std::nullopt;
  return *call == TimedCall::kWhole ? "whole" : "suffix";
}

void note_timed_call(PricedCut& cut, const std::string& call, double seconds) {
  cut.pricing->note(call == "whole" ? TimedCall::kWhole : TimedCall::kSuffix, seconds);
}

// Zero: not known yet.
graph::LinkRate link_rate(double bytes_per_s, bool sends_whole) {
  return {.bytes_per_s = bytes_per_s > 0 ? bytes_per_s : graph::kUnknownLinkBytesPerS, .sends_whole = sends_whole};
}

// None, True to return to the previous plan, or the prices for planning another one.
py::object change_of(Repricer& repricer, const std::shared_ptr<PricedCut>& cut) {
  std::optional<Repricer::Change> change = repricer.change_of(cut);
  if (!change) return py::none();
  if (change->goes_back) return py::bool_(true);
  return py::cast(*change->prices);
}

void bind_plans(py::module_& module) {
  py::class_<PricedPlans, std::shared_ptr<PricedPlans>>(module, "PricedPlans")
      .def(py::init(&make_plans), py::arg("graph"), py::arg("verdicts"), py::arg("calibration"), py::kw_only(),
           py::arg("cut"), py::arg("prices"))
      .def_property_readonly("graph", &PricedPlans::graph)
      .def_property_readonly("verdicts", &PricedPlans::verdicts)
      .def_property_readonly("calibration", &PricedPlans::calibration)
      .def_property_readonly("prices", &PricedPlans::prices)
      .def_property_readonly("chosen", &PricedPlans::chosen)
      .def_property_readonly("none", &PricedPlans::none)
      .def_property_readonly("maximal", &PricedPlans::maximal);

  py::class_<ShownPrice>(module, "ShownPrice")
      .def_readonly("times", &ShownPrice::times)
      .def_readonly("changes", &ShownPrice::changes)
      .def_property_readonly("trainer_s", [](const ShownPrice& price) { return price.step.trainer_s; })
      .def_property_readonly("worker_s", [](const ShownPrice& price) { return price.step.worker_s; })
      .def_property_readonly("link_s", [](const ShownPrice& price) { return price.step.link_s; })
      .def_property_readonly("step_s", [](const ShownPrice& price) { return price.step.step_s; })
      .def_readonly("workers", &ShownPrice::workers)
      .def_readonly("is_held", &ShownPrice::is_held);

  py::class_<PricedCut, std::shared_ptr<PricedCut>>(module, "PricedCut")
      .def(py::init([](std::shared_ptr<PricedPlans> plans, bool has_suffix, const PricedCut* like) {
             return std::make_shared<PricedCut>(
                 PricedCut{.plans = std::move(plans),
                           .pricing = like != nullptr ? like->pricing : std::make_shared<GraphPricing>(),
                           .has_suffix = has_suffix});
           }),
           py::arg("plans"), py::arg("has_suffix"), py::arg("like") = nullptr)
      .def_readonly("shown", &PricedCut::shown)
      .def_property_readonly("wants_timed_calls", [](const PricedCut& cut) { return cut.pricing->wants_timed_calls(); })
      .def("next_timed_call", &next_timed_call)
      .def("note_timed_call", &note_timed_call, py::arg("call"), py::arg("seconds"));
}

void bind_meter(py::module_& module) {
  py::class_<MeasuredLoads>(module, "MeasuredLoads")
      .def("__str__", &MeasuredLoads::text)
      .def_readonly("workers", &MeasuredLoads::workers)
      .def_readonly("trainer_s", &MeasuredLoads::trainer_s)
      .def_readonly("fetch_s", &MeasuredLoads::fetch_s)
      .def_readonly("prefix_s", &MeasuredLoads::prefix_s)
      .def_readonly("bytes", &MeasuredLoads::bytes)
      .def_property_readonly("link_bytes_per_s", [](const MeasuredLoads& loads) { return loads.link.bytes_per_s; })
      .def_readonly("step_s", &MeasuredLoads::step_s);

  py::class_<LoadMeter, std::shared_ptr<LoadMeter>>(module, "LoadMeter")
      .def(py::init<>())
      .def("begin", &LoadMeter::begin, py::arg("workers"), py::arg("in_flight_max"))
      .def(
          "note",
          [](LoadMeter& self, double called_at_s, double returned_at_s,
             const std::tuple<uint64_t, uint64_t, double, double, uint64_t, uint32_t, double>& counters,
             bool sends_whole) {
            const auto [batches, with_boundary, fetch_s, prefix_s, bytes, workers, link_bytes_per_s] = counters;
            self.note(called_at_s, returned_at_s,
                      {.batches = batches,
                       .with_boundary = with_boundary,
                       .fetch_s = fetch_s,
                       .prefix_s = prefix_s,
                       .bytes = bytes,
                       .workers = workers,
                       .link = link_rate(link_bytes_per_s, sends_whole)});
          },
          py::arg("called_at_s"), py::arg("returned_at_s"), py::arg("counters"), py::arg("sends_whole"))
      .def("note_waiting", &LoadMeter::note_waiting, py::arg("seconds"))
      .def("note_device", &LoadMeter::note_device, py::arg("seconds"))
      .def("skip", &LoadMeter::skip)
      .def("forget", &LoadMeter::forget)
      .def_property_readonly("step_count", &LoadMeter::step_count);
}

}  // namespace

void bind_repricing(py::module_& module) {
  bind_plans(module);
  bind_meter(module);
  py::class_<Repricer>(module, "Repricer")
      .def(py::init([](std::shared_ptr<LoadMeter> meter, double shift, uint32_t trial_windows) {
             return Repricer(std::move(meter), {.shift = shift, .trial_windows = trial_windows});
           }),
           py::arg("meter"), py::kw_only(), py::arg("shift") = graph::RepricingLimits{}.shift,
           py::arg("trial_windows") = graph::RepricingLimits{}.trial_windows)
      .def("note_call", &Repricer::note_call, py::arg("cut"), py::arg("weight"))
      .def_property_readonly("is_window_due", &Repricer::is_window_due)
      .def("take_window", &Repricer::take_window, py::arg("cpus"))
      .def("change_of", &change_of, py::arg("cut"))
      .def("changed", &Repricer::changed, py::arg("old"), py::arg("new"))
      .def("give_up", &Repricer::give_up, py::arg("cut"))
      .def_property_readonly("measured", &Repricer::measured)
      .def("__str__", &Repricer::text);
}

}  // namespace penstock::bindings
