// SPDX-License-Identifier: Apache-2.0
// Running programs, in Python. The runtime room runs and measures prefixes, both without the GIL; TorchScript programs
// are captured from a call, and the parts that a plan makes from them are run.
#include <pybind11/stl.h>
#include <torch/csrc/jit/api/compilation_unit.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/python/module_python.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/raise.h"
#include "capture/program.h"
#include "runtime/calibrate.h"
#include "runtime/executor.h"
#include "runtime/kernel_settings.h"
#include "runtime/numeric_fingerprint.h"
#include "runtime/placement.h"

namespace penstock::bindings {
namespace {

namespace py = pybind11;
using runtime::Executor;

std::optional<std::string> refusal(const Executor& executor, const std::vector<at::Tensor>& leaves) {
  const auto accepted = executor.accepts(leaves);
  return accepted ? std::nullopt : std::optional(accepted.error().message);
}

}  // namespace

void bind_runtime(py::module_& module) {
  py::class_<Executor>(module, "Executor")
      .def(py::init(
               [](const graph::Graph& graph, std::vector<at::Tensor> constants, bool allow_random, bool allow_state) {
                 return unwrap(Executor::create(graph, std::move(constants), {allow_random, allow_state}));
               }),
           py::arg("graph"), py::arg("constants"), py::kw_only(), py::arg("allow_random") = false,
           py::arg("allow_state") = false)
      .def("refusal", &refusal, py::arg("leaves"))
      .def(
          "run",
          [](const Executor& executor, const std::vector<at::Tensor>& leaves, std::optional<uint64_t> seed) {
            return unwrap(without_gil([&] { return executor.run(leaves, seed); }));
          },
          py::arg("leaves"), py::arg("seed") = std::nullopt)
      .def_property_readonly("draws", &Executor::draws)
      .def_property_readonly("graph", &Executor::graph)
      .def_property_readonly("saved_node_count", &Executor::saved_node_count);

  py::class_<runtime::PrefixRest>(module, "PrefixRest")
      .def(py::init([](const std::string& text, std::vector<at::Tensor> constants) {
             return unwrap(runtime::PrefixRest::create(text, std::move(constants)));
           }),
           py::arg("text"), py::arg("constants"))
      .def_property_readonly("keys", &runtime::PrefixRest::keys)
      .def(
          "run",
          [](runtime::PrefixRest& rest, const std::vector<at::Tensor>& leaves, std::vector<at::Tensor> given) {
            return unwrap(without_gil([&] { return rest.run(leaves, std::move(given)); }));
          },
          py::arg("leaves"), py::arg("given"));
  module.def("numeric_fingerprint", [] {
    const Numerics numerics = without_gil([] { return runtime::numeric_fingerprint(); });
    return std::vector<uint64_t>(numerics.begin(), numerics.end());
  });
  module.def("spoken_families", &spoken_families, py::arg("families"));
  module.def("kernel_settings", [] { return runtime::KernelSettings::now().text(); });

  module.def("seed_of_batch", &runtime::seed_of_batch, py::arg("prefix_seed"), py::arg("epoch_seed"),
             py::arg("sequence"));

  const runtime::CalibrateOptions defaults;
  module.def(
      "place_on_devices",
      [](const graph::Graph& graph, const std::vector<at::Tensor>& leaves, const std::vector<at::Tensor>& constants) {
        auto placed = without_gil([&] { return runtime::place_on_devices(graph, leaves, constants); });
        std::map<std::string, std::string> devices;
        for (size_t value = 0; value < placed.devices.size(); ++value)
          if (placed.devices[value]) devices.emplace(graph.value_names[value], placed.devices[value]->str());
        return std::pair(std::move(placed.graph), std::move(devices));
      },
      py::arg("graph"), py::arg("leaves"), py::arg("constants"));

  module.def(
      "calibrate",
      [](const graph::Graph& graph, const std::vector<graph::Verdict>& verdicts, const std::vector<at::Tensor>& leaves,
         const std::vector<std::optional<at::Tensor>>& constants, int round_count, double seconds_max) {
        return unwrap(without_gil([&] {
          return runtime::calibrate(graph, verdicts, leaves, constants, {round_count, seconds_max});
        }));
      },
      py::arg("graph"), py::arg("verdicts"), py::arg("leaves"), py::arg("constants"), py::kw_only(),
      py::arg("round_count") = defaults.round_count, py::arg("seconds_max") = defaults.seconds_max);
}

namespace {

namespace py = pybind11;
namespace jit = torch::jit;
using capture::ScriptCall;
using capture::ScriptPart;
using capture::ScriptProgram;

// A torch.jit.ScriptModule or a torch.jit.ScriptFunction.
struct Callee {
  std::optional<jit::Module> module;
  jit::Function* function;

  explicit Callee(const py::object& object) : module(jit::as_module(object)), function(nullptr) {
    if (module) {
      function = &module->get_method("forward").function();
    } else if (py::isinstance<jit::StrongFunctionPtr>(object)) {
      function = py::cast<jit::StrongFunctionPtr>(object).function_;
    } else {
      throw py::type_error("object must be a torch.jit.ScriptModule or torch.jit.ScriptFunction, got " +
                           std::string(py::str(py::type::of(object))) + "; script or trace it first");
    }
  }

  const jit::Module* self() const { return module ? &*module : nullptr; }
};

ScriptCall call_of(const py::object& callee_object, const py::tuple& args, const py::dict& kwargs) {
  const Callee callee(callee_object);
  std::optional<c10::IValue> self;
  if (callee.module) self = callee.module->_ivalue();
  jit::Stack stack = jit::createStackForSchema(callee.function->getSchema(), jit::tuple_slice(args),
                                               py::reinterpret_borrow<py::kwargs>(kwargs), std::move(self));
  if (callee.module) stack.erase(stack.begin());
  return {std::move(stack)};
}

ScriptProgram read(const py::object& callee_object, const ScriptCall& call,
                   const std::vector<std::optional<uint32_t>>& leaf_indices) {
  const Callee callee(callee_object);
  return unwrap(callee.module ? ScriptProgram::read(*callee.module, call, leaf_indices)
                              : ScriptProgram::read(*callee.function, call, leaf_indices));
}

py::object run(const ScriptPart& part, const py::object& callee_object, const ScriptCall& call,
               const std::vector<at::Tensor>& more) {
  const Callee callee(callee_object);
  return jit::toPyObject(without_gil([&] { return part.run(callee.self(), call, more); }));
}

}  // namespace

void bind_script(py::module_& module) {
  py::class_<ScriptCall>(module, "ScriptCall")
      .def(py::init(&call_of), py::arg("callee"), py::arg("args"), py::arg("kwargs"))
      .def_property_readonly("tensors", &ScriptCall::tensors)
      .def(
          "with_tensors",
          [](const ScriptCall& call, const std::vector<at::Tensor>& tensors) { return call.with_tensors(tensors); },
          py::arg("tensors"))
      .def("is_like", &ScriptCall::is_like, py::arg("other"));

  py::class_<ScriptPart>(module, "ScriptPart")
      .def_property_readonly("optimized_operators", &ScriptPart::optimized_operators)
      .def("run", &run, py::arg("callee"), py::arg("call"), py::arg("more") = std::vector<at::Tensor>());

  py::class_<ScriptProgram>(module, "ScriptProgram")
      .def(py::init(&read), py::arg("callee"), py::arg("call"), py::arg("leaf_indices"))
      .def_property_readonly("graph", &ScriptProgram::graph)
      .def_property_readonly("constants", &ScriptProgram::constants)
      .def("holds", &ScriptProgram::holds)
      .def("is_optimized_alike", &ScriptProgram::is_optimized_alike, py::arg("plan"), py::arg("whole"), py::arg("part"))
      .def(
          "suffix",
          [](const ScriptProgram& program, const graph::Plan& plan, bool is_optimized) {
            return unwrap(program.suffix(plan, is_optimized));
          },
          py::arg("plan"), py::kw_only(), py::arg("is_optimized") = true)
      .def(
          "reference",
          [](const ScriptProgram& program, const graph::Plan& plan) {
            return unwrap(program.computing(plan.boundary));
          },
          py::arg("plan"));

  module.def(
      "whole_script",
      [](const py::object& callee_object) {
        const Callee callee(callee_object);
        return callee.module ? capture::whole_program(*callee.module) : capture::whole_program(*callee.function);
      },
      py::arg("callee"), py::keep_alive<0, 1>());
}

}  // namespace penstock::bindings
