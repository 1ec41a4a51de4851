// SPDX-License-Identifier: Apache-2.0
// The runtime room in Python: running and measuring prefixes, both without the GIL.

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "bindings/raise.h"
#include "runtime/calibrate.h"
#include "runtime/executor.h"
#include "runtime/kernel_settings.h"
#include "runtime/numeric_fingerprint.h"
#include "runtime/placement.h"
#include "runtime/prefix_rest.h"
#include "runtime/seeded_draws.h"

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

}  // namespace penstock::bindings
