// SPDX-License-Identifier: Apache-2.0
// The graph room in Python: parsing graphs, effects, plans, prefixes. csrc/graph defines their meaning.

#include <pybind11/operators.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/python/module_python.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <map>
#include <set>

#include "bindings/raise.h"
#include "capture/capture.h"
#include "capture/operator_traits.h"
#include "capture/schema.h"
#include "graph/call_flow.h"
#include "graph/device_bits.h"
#include "graph/effects.h"
#include "graph/extract.h"
#include "graph/ir_text.h"
#include "graph/plan.h"
#include "graph/price.h"

namespace penstock::bindings {
namespace {

namespace py = pybind11;

c10::OperatorHandle operator_of(const std::string& name) {
  auto op = capture::find_operator(name);
  if (!op) raise_error({Errc::kUnsupported, "this version of torch does not have the operator " + name});
  return *std::move(op);
}

std::string kind_name(const graph::Input& input) {
  switch (input.kind) {
    case graph::InputKind::kLeaf: return "leaf";
    case graph::InputKind::kConst: return "const";
    case graph::InputKind::kState: return "state";
    case graph::InputKind::kInt: break;
  }
  return "int";
}

template <typename Items, typename Name>
std::vector<std::string> names(const Items& items, const Name& name) {
  std::vector<std::string> found;
  found.reserve(items.size());
  for (const auto& item : items) found.push_back(name(item));
  return found;
}

// The names of the inputs of the given kinds, in order.
std::vector<std::string> input_names(const graph::Graph& graph, std::initializer_list<graph::InputKind> kinds) {
  std::vector<std::string> found;
  for (const graph::Input& input : graph.inputs)
    if (std::find(kinds.begin(), kinds.end(), input.kind) != kinds.end())
      found.push_back(graph.value_names[input.value]);
  return found;
}

// The names of the values that nodes compute.
std::set<std::string> made_names(const graph::Graph& graph) {
  std::set<std::string> found;
  for (const graph::Node& node : graph.nodes)
    for (const graph::ValueId value : node.results) found.insert(graph.value_names[value]);
  return found;
}

std::set<std::string> operators(const graph::Graph& graph) {
  std::set<std::string> found;
  for (const graph::Node& node : graph.nodes) found.insert(node.op);
  return found;
}

graph::Graph without_outputs(graph::Graph graph, const std::set<std::string>& dropped) {
  std::erase_if(graph.outputs,
                [&](const graph::Output& output) { return dropped.contains(graph.value_names[output.value]); });
  return graph;
}

// The labels of the calls that a plan moves, by the names of their results.
std::map<std::string, std::string> moved_labels(const graph::Plan& plan, const graph::Graph& graph) {
  std::map<std::string, std::string> found;
  for (const graph::PlanGroup& group : plan.moved)
    for (const uint32_t node : group.nodes)
      for (const graph::ValueId value : graph.nodes.at(node).results) found[graph.value_names[value]] = group.label;
  return found;
}

// Takes extents by name, as (bytes, storage). Returns the flow of the graph's calls as ({call: bytes}, [(source,
// target, leaf, bytes)]).
py::tuple flow_of(const graph::Graph& graph, const std::map<std::string, std::pair<int64_t, uint64_t>>& extents) {
  std::vector<graph::ValueSize> by_value(graph.value_names.size());
  std::map<uint64_t, uint32_t> storages;
  for (size_t value = 0; value < by_value.size(); ++value) {
    const auto found = extents.find(graph.value_names[value]);
    if (found == extents.end()) continue;
    const auto [bytes, storage] = found->second;
    by_value[value] = {bytes, storages.emplace(storage, static_cast<uint32_t>(storages.size())).first->second};
  }
  graph::CallFlow flow = graph::call_flow(graph, by_value);
  py::list edges;
  for (const graph::CallEdge& edge : flow.edges)
    edges.append(py::make_tuple(edge.source, edge.target, edge.leaf, edge.bytes));
  return py::make_tuple(std::move(flow.made_bytes), edges);
}

// Returns None, or (whether the call reads an intermediate, the call, its reader).
py::object need(graph::NeededCalls& calls, uint32_t call) {
  const std::optional<graph::CallFault> fault = calls.need(call);
  if (!fault) return py::none();
  return py::make_tuple(fault->kind == graph::CallFault::Kind::kReadsIntermediate, fault->call, fault->reader);
}

graph::Plan plan_of(const graph::Graph& whole, const std::vector<graph::Verdict>& verdicts,
                    const graph::Calibration& calibration, const std::string& cut, const graph::Prices& prices) {
  return unwrap(graph::make_plan(whole, verdicts, calibration, prices, unwrap(graph::cut_mode_from_name(cut))));
}

std::pair<graph::Graph, std::vector<at::Tensor>> capture_module(const py::object& module,
                                                                const std::vector<at::Tensor>& leaves) {
  const auto script_module = torch::jit::as_module(module);
  if (!script_module)
    throw py::type_error("capture_torchscript requires a torch.jit.ScriptModule, got " +
                         std::string(py::str(py::type::of(module))) + "; script or trace the module first");
  capture::Captured captured = unwrap(capture::capture_torchscript(*script_module, leaves));
  return {std::move(captured.graph), std::move(captured.constants)};
}

}  // namespace

void bind_graph(py::module_& module) {
  using namespace penstock::graph;  // NOLINT(google-build-using-namespace): this function is its mirror

  py::class_<graph::Input>(module, "GraphInput")
      .def_property_readonly("kind", &kind_name)
      .def_readonly("leaf_index", &graph::Input::leaf_index)
      .def_readonly("source", &graph::Input::source)
      .def_property_readonly("dtype",
                             [](const graph::Input& input) { return std::string(graph::name_of(input.dtype)); })
      .def_readonly("sizes", &graph::Input::sizes)
      .def_readonly("digest", &graph::Input::digest);

  py::class_<graph::Graph>(module, "Graph")
      .def("__str__", &graph::print_graph)
      .def(py::self == py::self)  // NOLINT(misc-redundant-expression)
      .def_readonly("inputs", &graph::Graph::inputs)
      .def_readonly("value_names", &graph::Graph::value_names)
      .def_property_readonly(
          "output_names",
          [](const graph::Graph& graph) {
            return names(graph.outputs, [&](const graph::Output& output) { return graph.value_names[output.value]; });
          })
      .def_property_readonly("output_keys",
                             [](const graph::Graph& graph) {
                               return names(graph.outputs, [](const graph::Output& output) { return output.key; });
                             })
      .def_property_readonly("constant_names",
                             [](const graph::Graph& graph) { return input_names(graph, {graph::InputKind::kConst}); })
      .def_property_readonly("held_names",
                             [](const graph::Graph& graph) {
                               return input_names(graph, {graph::InputKind::kConst, graph::InputKind::kState});
                             })
      .def_property_readonly("made_names", &made_names)
      .def_property_readonly("operators", &operators)
      .def("without_outputs", &without_outputs, py::arg("names"))
      .def("flow", &flow_of, py::arg("extents"))
      .def_property_readonly("node_count", [](const graph::Graph& graph) { return graph.nodes.size(); })
      .def_property_readonly("bits_forms",
                             [](const graph::Graph& graph) {
                               std::vector<std::string> forms;
                               for (const graph::Node& node : graph.nodes)
                                 if (node.on) forms.push_back(graph::bits_form(node));
                               return forms;
                             })
      .def("put_equal_twins", &graph::put_equal_twins)
      .def("annotate", &capture::annotate);

  py::class_<graph::Verdict>(module, "Verdict")
      .def_property_readonly("level",
                             [](const graph::Verdict& verdict) { return std::string(graph::name_of(verdict.level)); })
      .def_readonly("movable", &graph::Verdict::movable)
      .def_readonly("has_other_bits", &graph::Verdict::has_other_bits)
      .def_readonly("is_inexact", &graph::Verdict::is_inexact)
      .def_readonly("reason", &graph::Verdict::reason);

  py::class_<graph::ValueSize>(module, "ValueSize")
      .def_readonly("bytes", &graph::ValueSize::bytes)
      .def_readonly("storage", &graph::ValueSize::storage);

  py::class_<graph::Calibration>(module, "Calibration")
      .def_readonly("node_s", &graph::Calibration::node_s)
      .def_readonly("trainer_node_s", &graph::Calibration::trainer_node_s)
      .def_readonly("copy_bytes_per_s", &graph::Calibration::copy_bytes_per_s)
      .def_readonly("values", &graph::Calibration::values);

  py::class_<graph::Loads>(module, "Loads")
      .def(py::init([](double trainer_s, double worker_s, double link_s, double cpus) {
             return graph::Loads{.trainer_s = trainer_s, .worker_s = worker_s, .link_s = link_s, .cpus = cpus};
           }),
           py::kw_only(), py::arg("trainer_s"), py::arg("worker_s"), py::arg("link_s") = 0.0, py::arg("cpus") = 0.0)
      .def_readonly("trainer_s", &graph::Loads::trainer_s)
      .def_readonly("worker_s", &graph::Loads::worker_s)
      .def_readonly("link_s", &graph::Loads::link_s)
      .def_readonly("cpus", &graph::Loads::cpus);

  py::class_<graph::StageSeconds>(module, "StageSeconds")
      .def_readonly("trainer_s", &graph::StageSeconds::trainer_s)
      .def_readonly("worker_s", &graph::StageSeconds::worker_s)
      .def_readonly("link_s", &graph::StageSeconds::link_s);

  py::class_<graph::PlanGroup>(module, "PlanGroup")
      .def_readonly("group", &graph::PlanGroup::group)
      .def_readonly("label", &graph::PlanGroup::label)
      .def_readonly("operators", &graph::PlanGroup::operators)
      .def_property_readonly("level",
                             [](const graph::PlanGroup& group) { return std::string(graph::name_of(group.level)); })
      .def_readonly("replicated", &graph::PlanGroup::replicated)
      .def_readonly("reason", &graph::PlanGroup::reason)
      .def_readonly("worker_s", &graph::PlanGroup::worker_s)
      .def_readonly("trainer_s", &graph::PlanGroup::trainer_s);

  py::class_<graph::Plan>(module, "Plan")
      .def_readonly("moved", &graph::Plan::moved)
      .def_readonly("kept", &graph::Plan::kept)
      .def_readonly("boundary", &graph::Plan::boundary_names)
      .def_readonly("raw_leaves", &graph::Plan::raw_leaves)
      .def_readonly("raw_bytes", &graph::Plan::raw_bytes)
      .def_readonly("maximal_bytes", &graph::Plan::maximal_bytes)
      .def_readonly("boundary_bytes", &graph::Plan::boundary_bytes)
      .def_readonly("sent_bytes", &graph::Plan::sent_bytes)
      .def_readonly("worker_s", &graph::Plan::worker_s)
      .def_readonly("trainer_s", &graph::Plan::trainer_s)
      .def_readonly("seconds", &graph::Plan::seconds)
      .def_readonly("step_s", &graph::Plan::step_s)
      .def("moved_labels", &moved_labels, py::arg("graph"));

  module.def(
      "parse_graph", [](const std::string& text) { return unwrap(graph::parse_graph(text)); }, py::arg("text"));
  module.def("device_bits_tables", [] {
    const auto tables = graph::device_bits_tables();
    return std::vector<std::string>(tables.begin(), tables.end());
  });
  module.def(
      "add_device_bits", [](const std::string& table) { unwrap(graph::add_device_bits(table)); }, py::arg("table"));
  module.def(
      "analyse_effects",
      [](const graph::Graph& graph, bool allow_random, const std::set<std::string>& known_outside,
         const std::map<std::string, int64_t>& memory, const std::set<std::string>& may_be_inexact) {
        graph::EffectOptions options{.allow_random = allow_random};
        for (graph::ValueId value = 0; value < graph.value_names.size(); ++value) {
          const std::string& name = graph.value_names[value];
          if (known_outside.contains(name)) options.known_outside.push_back(value);
          const auto known = memory.find(name);
          options.memory.push_back(known == memory.end() ? std::nullopt : std::optional(known->second));
          options.may_be_inexact.push_back(may_be_inexact.contains(name));
        }
        return graph::analyse_effects(graph, options);
      },
      py::arg("graph"), py::arg("allow_random") = false, py::arg("known_outside") = std::set<std::string>(),
      py::arg("memory") = std::map<std::string, int64_t>(), py::arg("may_be_inexact") = std::set<std::string>());

  py::class_<graph::CapturedCall>(module, "CapturedCall")
      .def(py::init([](uint32_t unit, bool is_droppable, bool reads_intermediate, std::vector<uint32_t> reads) {
             return graph::CapturedCall{unit, is_droppable, reads_intermediate, std::move(reads)};
           }),
           py::arg("unit"), py::arg("is_droppable"), py::arg("reads_intermediate"), py::arg("reads"));
  py::class_<graph::NeededCalls>(module, "NeededCalls")
      .def(py::init<std::vector<graph::CapturedCall>, std::set<uint32_t>>(), py::arg("calls"),
           py::arg("forbidden_units"))
      .def("need", &need, py::arg("call"))
      .def("need_region", &graph::NeededCalls::need_region, py::arg("first"), py::arg("last"))
      .def_property_readonly("calls", &graph::NeededCalls::calls);

  const graph::Prices standard;
  py::class_<graph::Prices>(module, "Prices")
      .def(
          py::init([](double worker_count, double worker_second, double trainer_scale, double worker_scale,
                      double trainer_node_s, double link_bytes_per_s, double write_bytes_per_s, double read_bytes_per_s,
                      double cut_s, bool raw_stays, const std::optional<graph::Loads>& loads) {
            return graph::Prices{.worker_count = worker_count,
                                 .worker_second = worker_second,
                                 .trainer_scale = trainer_scale,
                                 .worker_scale = worker_scale,
                                 .trainer_node_s = trainer_node_s,
                                 .link_bytes_per_s = link_bytes_per_s,
                                 .write_bytes_per_s = write_bytes_per_s,
                                 .read_bytes_per_s = read_bytes_per_s,
                                 .cut_s = cut_s,
                                 .raw_stays = raw_stays,
                                 .loads = loads};
          }),
          py::kw_only(), py::arg("worker_count") = standard.worker_count,
          py::arg("worker_second") = standard.worker_second, py::arg("trainer_scale") = standard.trainer_scale,
          py::arg("worker_scale") = standard.worker_scale, py::arg("trainer_node_s") = standard.trainer_node_s,
          py::arg("link_bytes_per_s") = standard.link_bytes_per_s,
          py::arg("write_bytes_per_s") = standard.write_bytes_per_s,
          py::arg("read_bytes_per_s") = standard.read_bytes_per_s, py::arg("cut_s") = standard.cut_s,
          py::arg("raw_stays") = standard.raw_stays, py::arg("loads") = std::nullopt)
      .def_static(
          "of_local_workers",
          [](double worker_count, double trainer_scale, double worker_scale) {
            graph::Prices prices = graph::local_prices(worker_count);
            prices.trainer_scale = trainer_scale;
            prices.worker_scale = worker_scale;
            return prices;
          },
          py::arg("worker_count"), py::arg("trainer_scale") = 1.0, py::arg("worker_scale") = 1.0)
      .def_static(
          "of_pool",
          [](double worker_count, double link_bytes_per_s, bool sends_whole) {
            return graph::link_prices(
                worker_count, {.bytes_per_s = link_bytes_per_s > 0 ? link_bytes_per_s : graph::kUnknownLinkBytesPerS,
                               .sends_whole = sends_whole});
          },
          py::arg("worker_count"), py::kw_only(), py::arg("link_bytes_per_s"), py::arg("sends_whole"))
      .def_readonly("worker_count", &graph::Prices::worker_count)
      .def_readonly("link_bytes_per_s", &graph::Prices::link_bytes_per_s)
      .def_readonly("raw_stays", &graph::Prices::raw_stays)
      .def_readonly("loads", &graph::Prices::loads);

  module.def("make_plan", &plan_of, py::arg("graph"), py::arg("verdicts"), py::arg("calibration"), py::kw_only(),
             py::arg("cut") = "auto", py::arg("prices") = standard);
  module.def(
      "extract_prefix",
      [](const graph::Graph& graph, const graph::Plan& plan, std::string_view draws_of, std::string_view settings) {
        return unwrap(graph::extract_prefix(graph, plan, draws_of, settings));
      },
      py::arg("graph"), py::arg("plan"), py::arg("draws_of") = "", py::arg("settings") = "");
  module.def("value_keys", &graph::value_keys, py::arg("graph"), py::arg("draws_of") = "");
  module.def(
      "written_arguments",
      [](const std::string& name) {
        std::vector<std::pair<size_t, std::optional<size_t>>> written;
        for (const auto& one : capture::written_arguments(operator_of(name)))
          written.emplace_back(one.position, one.flag);
        return written;
      },
      py::arg("operator"));
  module.def(
      "functional_twin",
      [](const std::string& name) -> std::optional<std::pair<std::string, bool>> {
        const auto twin = capture::functional_twin(operator_of(name));
        if (!twin) return std::nullopt;
        return std::pair(twin->name, twin->is_view_alone);
      },
      py::arg("operator"));
  module.def(
      "overload_with_numbers",
      [](const std::string& name, const std::set<size_t>& positions) {
        return capture::overload_with_numbers(operator_of(name), positions);
      },
      py::arg("operator"), py::arg("positions"));
  module.def("content_digest", &capture::content_digest, py::arg("tensor"), py::call_guard<py::gil_scoped_release>());
  module.def("capture_torchscript", &capture_module, py::arg("module"), py::arg("leaves"));
}

}  // namespace penstock::bindings
