// SPDX-License-Identifier: Apache-2.0
// The graph room in Python: texts to graphs, effects, plans, prefixes. See csrc/graph for what each means.

#include <pybind11/operators.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/python/module_python.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/raise.h"
#include "graph/capture.h"
#include "graph/effects.h"
#include "graph/extract.h"
#include "graph/ir_text.h"
#include "graph/plan.h"
#include "graph/price.h"

namespace penstock::bindings {
namespace {

namespace py = pybind11;

std::string kind_name(const graph::Input& input) {
  switch (input.kind) {
    case graph::InputKind::kLeaf: return "leaf";
    case graph::InputKind::kConst: return "const";
    case graph::InputKind::kState: return "state";
    case graph::InputKind::kInt: break;
  }
  return "int";
}

graph::Plan plan_of(const graph::Graph& whole, const std::vector<graph::Verdict>& verdicts,
                    const graph::Calibration& calibration, const std::string& cut, const graph::Prices& prices) {
  return unwrap(graph::make_plan(whole, verdicts, calibration, prices, unwrap(graph::cut_mode_from_name(cut))));
}

std::pair<graph::Graph, std::vector<at::Tensor>> capture_module(const py::object& module,
                                                                const std::vector<at::Tensor>& leaves) {
  const auto script_module = torch::jit::as_module(module);
  if (!script_module)
    throw py::type_error("capture_torchscript takes a torch.jit.ScriptModule, not " +
                         std::string(py::str(py::type::of(module))) + "; script or trace the module first");
  graph::Captured captured = unwrap(graph::capture_torchscript(*script_module, leaves));
  return {std::move(captured.graph), std::move(captured.constants)};
}

}  // namespace

void bind_graph(py::module_& module) {
  using namespace penstock::graph;  // NOLINT(google-build-using-namespace): this function is its mirror

  py::class_<Input>(module, "GraphInput")
      .def_property_readonly("kind", &kind_name)
      .def_readonly("leaf_index", &Input::leaf_index)
      .def_readonly("source", &Input::source)
      .def_property_readonly("dtype", [](const Input& input) { return std::string(name_of(input.dtype)); })
      .def_readonly("sizes", &Input::sizes)
      .def_readonly("digest", &Input::digest);

  py::class_<Graph>(module, "Graph")
      .def("__str__", &print_graph)
      .def(py::self == py::self)  // NOLINT(misc-redundant-expression)
      .def_readonly("inputs", &Graph::inputs)
      .def_readonly("value_names", &Graph::value_names)
      .def_property_readonly("output_names",
                             [](const Graph& graph) {
                               std::vector<std::string> names(graph.outputs.size());
                               std::transform(graph.outputs.begin(), graph.outputs.end(), names.begin(),
                                              [&](const Output& output) { return graph.value_names[output.value]; });
                               return names;
                             })
      .def_property_readonly("output_keys",
                             [](const Graph& graph) {
                               std::vector<std::string> keys(graph.outputs.size());
                               std::transform(graph.outputs.begin(), graph.outputs.end(), keys.begin(),
                                              [](const Output& output) { return output.key; });
                               return keys;
                             })
      .def_property_readonly("node_count", [](const Graph& graph) { return graph.nodes.size(); })
      .def("annotate", &annotate);

  py::class_<Verdict>(module, "Verdict")
      .def_property_readonly("level", [](const Verdict& verdict) { return std::string(name_of(verdict.level)); })
      .def_readonly("movable", &Verdict::movable)
      .def_readonly("reason", &Verdict::reason);

  py::class_<ValueSize>(module, "ValueSize")
      .def_readonly("bytes", &ValueSize::bytes)
      .def_readonly("storage", &ValueSize::storage);

  py::class_<Calibration>(module, "Calibration")
      .def_readonly("node_s", &Calibration::node_s)
      .def_readonly("trainer_node_s", &Calibration::trainer_node_s)
      .def_readonly("values", &Calibration::values);

  py::class_<Loads>(module, "Loads")
      .def(py::init([](double trainer_s, double worker_s, double cpus) {
             return Loads{trainer_s, worker_s, cpus};
           }),
           py::kw_only(), py::arg("trainer_s"), py::arg("worker_s"), py::arg("cpus") = 0.0)
      .def_readonly("trainer_s", &Loads::trainer_s)
      .def_readonly("worker_s", &Loads::worker_s)
      .def_readonly("cpus", &Loads::cpus);

  py::class_<StageSeconds>(module, "StageSeconds")
      .def_readonly("trainer_s", &StageSeconds::trainer_s)
      .def_readonly("worker_s", &StageSeconds::worker_s)
      .def_readonly("link_s", &StageSeconds::link_s);

  py::class_<PlanGroup>(module, "PlanGroup")
      .def_readonly("group", &PlanGroup::group)
      .def_readonly("label", &PlanGroup::label)
      .def_readonly("operators", &PlanGroup::operators)
      .def_property_readonly("level", [](const PlanGroup& group) { return std::string(name_of(group.level)); })
      .def_readonly("replicated", &PlanGroup::replicated)
      .def_readonly("reason", &PlanGroup::reason)
      .def_readonly("worker_s", &PlanGroup::worker_s)
      .def_readonly("trainer_s", &PlanGroup::trainer_s);

  py::class_<Plan>(module, "Plan")
      .def_readonly("moved", &Plan::moved)
      .def_readonly("kept", &Plan::kept)
      .def_readonly("boundary", &Plan::boundary_names)
      .def_readonly("raw_leaves", &Plan::raw_leaves)
      .def_readonly("raw_bytes", &Plan::raw_bytes)
      .def_readonly("maximal_bytes", &Plan::maximal_bytes)
      .def_readonly("boundary_bytes", &Plan::boundary_bytes)
      .def_readonly("worker_s", &Plan::worker_s)
      .def_readonly("trainer_s", &Plan::trainer_s)
      .def_readonly("seconds", &Plan::seconds)
      .def_readonly("step_s", &Plan::step_s);

  module.def(
      "parse_graph", [](const std::string& text) { return unwrap(parse_graph(text)); }, py::arg("text"));
  module.def(
      "analyse_effects", [](const Graph& graph, bool allow_random) { return analyse_effects(graph, {allow_random}); },
      py::arg("graph"), py::arg("allow_random") = false);

  module.def(
      "plan_seconds",
      [](const Graph& graph, const std::vector<Verdict>& verdicts, const Calibration& calibration, const Plan& plan,
         double worker_count, double trainer_scale, double worker_scale, double link_bytes_per_s,
         double write_bytes_per_s, double read_bytes_per_s, double cut_s, bool raw_stays) {
        return unwrap(plan_seconds(graph, verdicts, calibration,
                                   {.worker_count = worker_count,
                                    .trainer_scale = trainer_scale,
                                    .worker_scale = worker_scale,
                                    .link_bytes_per_s = link_bytes_per_s,
                                    .write_bytes_per_s = write_bytes_per_s,
                                    .read_bytes_per_s = read_bytes_per_s,
                                    .cut_s = cut_s,
                                    .raw_stays = raw_stays},
                                   plan));
      },
      py::arg("graph"), py::arg("verdicts"), py::arg("calibration"), py::arg("plan"), py::kw_only(),
      py::arg("worker_count"), py::arg("trainer_scale"), py::arg("worker_scale"), py::arg("link_bytes_per_s"),
      py::arg("write_bytes_per_s"), py::arg("read_bytes_per_s"), py::arg("cut_s"), py::arg("raw_stays"));

  const Prices prices;
  module.def(
      "make_plan",
      [](const Graph& graph, const std::vector<Verdict>& verdicts, const Calibration& calibration,
         const std::string& cut, double worker_count, double worker_second, double trainer_scale, double worker_scale,
         double trainer_node_s, double link_bytes_per_s, double write_bytes_per_s, double read_bytes_per_s,
         double cut_s, bool raw_stays, const std::optional<Loads>& loads) {
        return plan_of(graph, verdicts, calibration, cut,
                       {worker_count, worker_second, trainer_scale, worker_scale, trainer_node_s, link_bytes_per_s,
                        write_bytes_per_s, read_bytes_per_s, cut_s, raw_stays, loads});
      },
      py::arg("graph"), py::arg("verdicts"), py::arg("calibration"), py::kw_only(), py::arg("cut") = "auto",
      py::arg("worker_count") = prices.worker_count, py::arg("worker_second") = prices.worker_second,
      py::arg("trainer_scale") = prices.trainer_scale, py::arg("worker_scale") = prices.worker_scale,
      py::arg("trainer_node_s") = prices.trainer_node_s, py::arg("link_bytes_per_s") = prices.link_bytes_per_s,
      py::arg("write_bytes_per_s") = prices.write_bytes_per_s, py::arg("read_bytes_per_s") = prices.read_bytes_per_s,
      py::arg("cut_s") = prices.cut_s, py::arg("raw_stays") = prices.raw_stays, py::arg("loads") = std::nullopt);
  module.def(
      "extract_prefix",
      [](const Graph& graph, const Plan& plan, std::string_view draws_of) {
        return unwrap(extract_prefix(graph, plan, draws_of));
      },
      py::arg("graph"), py::arg("plan"), py::arg("draws_of") = "");
  module.def("value_keys", &value_keys, py::arg("graph"), py::arg("draws_of") = "");
  module.def("content_digest", &content_digest, py::arg("tensor"), py::call_guard<py::gil_scoped_release>());
  module.def("capture_torchscript", &capture_module, py::arg("module"), py::arg("leaves"));
}

}  // namespace penstock::bindings
