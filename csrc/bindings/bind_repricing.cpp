// SPDX-License-Identifier: Apache-2.0
// The graph room's part that runs during training, in Python: the plans of one graph, pricing them again while a loader
// runs, and the conditions on the sizes of a batch.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/raise.h"
#include "graph/load_meter.h"
#include "graph/repricer.h"
#include "graph/size_ops.h"

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

namespace py = pybind11;

namespace {

using graph::SizeExpression;

// An integer, ("symbol", position), or an operator's name and its operands.
SizeExpression expression_of(const py::handle& given) {
  using Op = SizeExpression::Op;
  static const std::map<std::string, Op> kOperators{
      {"symbol", Op::kSymbol}, {"add", Op::kAdd}, {"mul", Op::kMul}, {"floordiv", Op::kFloorDiv},
      {"mod", Op::kMod},       {"max", Op::kMax}, {"min", Op::kMin}, {"eq", Op::kEq},
      {"ne", Op::kNe},         {"lt", Op::kLt},   {"le", Op::kLe},   {"gt", Op::kGt},
      {"ge", Op::kGe},         {"and", Op::kAnd}, {"or", Op::kOr},   {"not", Op::kNot}};
  if (!py::isinstance<py::tuple>(given)) return {.value = given.cast<int64_t>()};
  const auto parts = given.cast<py::tuple>();
  const auto name = parts[0].cast<std::string>();
  const auto found = kOperators.find(name);
  if (found == kOperators.end() || parts.size() < 2)
    throw py::value_error("a size is computed by " + name +
                          ", but must be computed by an operator of csrc/graph/size_ops.h");
  SizeExpression expression{.op = found->second};
  if (expression.op == Op::kSymbol) {
    expression.value = parts[1].cast<int64_t>();
    return expression;
  }
  for (size_t place = 1; place < parts.size(); ++place) expression.operands.push_back(expression_of(parts[place]));
  return expression;
}

std::vector<SizeExpression> expressions_of(const py::sequence& given) {
  std::vector<SizeExpression> expressions;
  for (const py::handle& item : given) expressions.push_back(expression_of(item));
  return expressions;
}

// Conditions on the sizes of a batch, evaluated for the Python inputs of a graph: the conditions of one program on its
// tensors and integers, by position. Confined to one thread, under the GIL.
class InputConditions {
 public:
  using Unusual = std::function<bool(const std::vector<int64_t>&)>;

  InputConditions(std::vector<std::pair<size_t, int64_t>> symbols,
                  std::vector<std::tuple<size_t, int64_t, int64_t>> fixed_sizes,
                  std::vector<std::pair<size_t, int64_t>> fixed_ints, const py::sequence& guards,
                  const std::vector<std::pair<size_t, py::sequence>>& strides, std::optional<Unusual> unusual)
      : symbols_(std::move(symbols)),
        fixed_sizes_(std::move(fixed_sizes)),
        fixed_ints_(std::move(fixed_ints)),
        unusual_(std::move(unusual)),
        conditions_(expressions_of(guards), strides_of(strides)) {
    for (const auto& [input, _] : strides) strided_inputs_.push_back(input);
  }

  bool hold(const py::sequence& inputs) {
    for (const auto& [input, dim, size] : fixed_sizes_)
      if (tensor(inputs, input).size(dim) != size) return false;
    for (const auto& [input, value] : fixed_ints_)
      if (py::int_(inputs[input]).cast<int64_t>() != value) return false;
    std::vector<int64_t> sizes;
    sizes.reserve(symbols_.size());
    for (const auto& [input, dim] : symbols_) sizes.push_back(tensor(inputs, input).size(dim));
    const auto* strides = conditions_.strides_for(sizes, [&] { return !unusual_ || (*unusual_)(sizes); });
    if (strides == nullptr) return false;
    for (size_t place = 0; place < strided_inputs_.size(); ++place)
      if (tensor(inputs, strided_inputs_[place]).strides() != at::IntArrayRef((*strides)[place])) return false;
    return true;
  }

 private:
  static at::Tensor tensor(const py::sequence& inputs, size_t place) { return inputs[place].cast<at::Tensor>(); }

  static std::vector<std::vector<SizeExpression>> strides_of(
      const std::vector<std::pair<size_t, py::sequence>>& strides) {
    std::vector<std::vector<SizeExpression>> expressions;
    expressions.reserve(strides.size());
    for (const auto& [_, of_one] : strides) expressions.push_back(expressions_of(of_one));
    return expressions;
  }

  const std::vector<std::pair<size_t, int64_t>> symbols_;
  const std::vector<std::tuple<size_t, int64_t, int64_t>> fixed_sizes_;
  const std::vector<std::pair<size_t, int64_t>> fixed_ints_;
  const std::optional<Unusual> unusual_;
  graph::SizeConditions conditions_;
  std::vector<size_t> strided_inputs_;
};

}  // namespace

void bind_sizes(py::module_& module) {
  py::class_<InputConditions>(module, "InputConditions")
      .def(py::init<std::vector<std::pair<size_t, int64_t>>, std::vector<std::tuple<size_t, int64_t, int64_t>>,
                    std::vector<std::pair<size_t, int64_t>>, const py::sequence&,
                    const std::vector<std::pair<size_t, py::sequence>>&, std::optional<InputConditions::Unusual>>(),
           py::kw_only(), py::arg("symbols"), py::arg("fixed_sizes"), py::arg("fixed_ints"), py::arg("guards"),
           py::arg("strides"), py::arg("unusual"))
      .def("hold", &InputConditions::hold, py::arg("inputs"));
}

}  // namespace penstock::bindings
