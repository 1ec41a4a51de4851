// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "base/bytes.h"
#include "base/clock.h"
#include "base/process.h"
#include "bindings/raise.h"
#include "controller/controller.h"
#include "controller/operator_request.h"
#include "net/key_folder.h"
#include "net/key_making.h"

namespace py = pybind11;

namespace penstock::bindings {

using controller::Controller;
using net::Role;

namespace {

// Priority and quota by the name of a job or a user.
using Terms = std::map<std::string, std::pair<double, std::optional<uint32_t>>>;

std::map<std::string, scheduling::JobTerms> job_terms_of(const Terms& terms) {
  std::map<std::string, scheduling::JobTerms> result;
  for (const auto& [name, given] : terms) result[name] = {.priority = given.first, .quota = given.second};
  return result;
}

Result<std::unique_ptr<Controller>> start_controller(const std::string& endpoint,
                                                     const std::optional<std::string>& folder,
                                                     const std::string& policy, const Terms& terms,
                                                     const Terms& user_terms, uint64_t keep_bytes) {
  scheduling::RosterOptions shares;
  shares.policy = scheduling::policy_named(policy);
  if (shares.policy == nullptr)
    throw py::value_error("the policy " + policy + " is unknown; use gpu-progress or max-min");
  shares.terms = job_terms_of(terms);
  shares.user_terms = job_terms_of(user_terms);
  shares.keep_bytes = keep_bytes;
  auto parsed = net::Endpoint::parse(endpoint);
  if (!parsed) return parsed.error();
  auto keys = net::load_keys(folder, Role::kController);
  if (!keys) return keys.error();
  return Controller::start(parsed.value(), keys.value(), std::move(shares));
}

Result<wire::ControlMessage> ask(const std::string& endpoint, const std::optional<std::string>& folder,
                                 const wire::ControlMessage& question, double timeout_s) {
  auto parsed = net::Endpoint::parse(endpoint);
  if (!parsed) return parsed.error();
  auto keys = net::load_keys(folder, Role::kOperator);
  if (!keys) return keys.error();
  return controller::query_controller(parsed.value(), keys.value(), question,
                                      std::chrono::steady_clock::now() + duration_of(timeout_s));
}

void bind_scaling(py::module_& module) {
  using wire::EngineWorker;
  using wire::ScaleOrders;
  using wire::ScaleReport;
  py::class_<EngineWorker>(module, "EngineWorker")
      .def(py::init([](std::string name, uint8_t state) {
             return EngineWorker{.name = std::move(name), .state = static_cast<EngineWorker::State>(state)};
           }),
           py::arg("name"), py::arg("state"))
      .def_readonly("name", &EngineWorker::name)
      .def_property_readonly("state", [](const EngineWorker& self) { return static_cast<uint8_t>(self.state); });
  py::class_<ScaleReport>(module, "ScaleReport")
      .def(py::init<>())
      .def_readwrite("adapter_id", &ScaleReport::adapter_id)
      .def_readwrite("engine", &ScaleReport::engine)
      .def_readwrite("worker_count_min", &ScaleReport::worker_count_min)
      .def_readwrite("worker_count_max", &ScaleReport::worker_count_max)
      .def_readwrite("idle_ms", &ScaleReport::idle_ms)
      .def_readwrite("start_allowance_ms", &ScaleReport::start_allowance_ms)
      .def_readwrite("price_micros_per_hour", &ScaleReport::price_micros_per_hour)
      .def_readwrite("has_budget", &ScaleReport::has_budget)
      .def_readwrite("budget_micros", &ScaleReport::budget_micros)
      .def_readwrite("spent_worker_ms", &ScaleReport::spent_worker_ms)
      .def_readwrite("refusal_count", &ScaleReport::refusal_count)
      .def_readwrite("refusal", &ScaleReport::refusal)
      .def_readwrite("trouble", &ScaleReport::trouble)
      .def_readwrite("workers", &ScaleReport::workers);
  py::class_<ScaleOrders>(module, "ScaleOrders")
      .def_readonly("wanted_count", &ScaleOrders::wanted_count)
      .def_readonly("reason", &ScaleOrders::reason)
      .def_readonly("is_to_end", &ScaleOrders::is_to_end)
      .def_readonly("stops", &ScaleOrders::stops);
}

constexpr double kMicros = 1e6;

wire::CostFactor factor_of(std::optional<double> value) {
  if (!value) return {};
  if (!(*value >= 0 && *value <= 1e12)) throw py::value_error("a price or factor must be from 0 to 1e12");
  return {.is_given = true, .micros = static_cast<uint64_t>(std::llround(*value * kMicros))};
}

template <typename Answer>
Answer expect(const wire::ControlMessage& message) {
  const auto* answer = std::get_if<Answer>(&message);
  if (answer == nullptr) raise_failure({Errc::kMalformed, "the controller answered another request"});
  return *answer;
}

}  // namespace

void bind_controller(py::module_& module) {
  module.def(
      "make_key_folder",
      [](const std::string& folder) { unwrap(without_gil([&] { return net::make_key_folder(folder); })); },
      py::arg("folder"));
  module.def(
      "make_user_keys",
      [](const std::string& folder, const std::string& user, const std::string& user_folder) {
        unwrap(without_gil([&] { return net::make_user_keys(folder, user, user_folder); }));
      },
      py::arg("folder"), py::arg("user"), py::arg("user_folder"));
  module.def(
      "make_machine_keys",
      [](const std::string& folder, const std::string& machine, const std::string& machine_folder) {
        unwrap(without_gil([&] { return net::make_machine_keys(folder, machine, machine_folder); }));
      },
      py::arg("folder"), py::arg("machine"), py::arg("machine_folder"));
  module.def(
      "rotate_keys", [](const std::string& folder) { unwrap(without_gil([&] { return net::rotate_keys(folder); })); },
      py::arg("folder"));
  module.def(
      "finish_rotation",
      [](const std::string& folder) { unwrap(without_gil([&] { return net::finish_rotation(folder); })); },
      py::arg("folder"));
  module.def("warning_of_workers_keys", &net::warning_of_workers_keys, py::arg("folder"));
  module.def("shared_key_folder", [] { return unwrap(without_gil([] { return net::shared_key_folder(); })); });
  module.def("raise_descriptor_limit", [] { return format_limit(raise_descriptor_limit()); });
  module.def("close_memory", &close_memory);
  module.attr("DESCRIPTOR_LIMIT_LEAST") = kDescriptorLimitMin;

  py::class_<Controller>(module, "Controller")
      .def_static(
          "start",
          [](const std::string& endpoint, const std::optional<std::string>& key_folder, const std::string& policy,
             const Terms& terms, const Terms& user_terms, uint64_t keep_bytes) {
            return unwrap(without_gil(
                [&] { return start_controller(endpoint, key_folder, policy, terms, user_terms, keep_bytes); }));
          },
          py::arg("endpoint"), py::arg("key_folder"), py::arg("policy") = "gpu-progress", py::arg("terms") = Terms(),
          py::arg("user_terms") = Terms(), py::arg("keep_bytes") = 0)
      .def_property_readonly("endpoint", [](const Controller& self) { return self.endpoint().text(); })
      .def(
          "run",
          [](Controller& self, int stop_fd, const std::optional<py::function>& log) {
            const Controller::Log call = [&log](const std::string& line, bool is_failure) {
              const py::gil_scoped_acquire gil;
              const auto size = static_cast<py::ssize_t>(line.size());
              // The line contains bytes that other processes have chosen.
              PyObject* text = PyUnicode_DecodeUTF8(line.data(), size, "backslashreplace");
              if (text == nullptr) throw py::error_already_set();
              (*log)(py::reinterpret_steal<py::str>(text), is_failure);
            };
            unwrap(without_gil([&] { return self.run(stop_fd, log ? call : Controller::Log()); }));
          },
          py::arg("stop_fd"), py::arg("log") = py::none());

  module.def(
      "pool_status",
      [](const std::string& endpoint, const std::optional<std::string>& key_folder, double timeout_s) {
        auto answer = without_gil([&] { return ask(endpoint, key_folder, wire::StatusRequest{}, timeout_s); });
        return expect<wire::Status>(unwrap(std::move(answer))).json;
      },
      py::arg("endpoint"), py::arg("key_folder"), py::arg("timeout_s"));
  module.def(
      "pool_plan",
      [](const std::string& endpoint, const std::optional<std::string>& key_folder, uint64_t trainer_id,
         double timeout_s) {
        const wire::PlanRequest request{.trainer_id = trainer_id};
        auto answer = without_gil([&] { return ask(endpoint, key_folder, request, timeout_s); });
        return expect<wire::PlanAnswer>(unwrap(std::move(answer))).json;
      },
      py::arg("endpoint"), py::arg("key_folder"), py::arg("trainer_id"), py::arg("timeout_s"));
  module.def(
      "pool_costs",
      [](const std::string& endpoint, const std::optional<std::string>& key_folder, double timeout_s,
         std::optional<double> price_per_hour, std::optional<double> energy_price_per_kwh,
         std::optional<double> gco2_per_kwh) {
        const wire::CostsRequest request{.price_per_hour = factor_of(price_per_hour),
                                         .energy_price_per_kwh = factor_of(energy_price_per_kwh),
                                         .gco2_per_kwh = factor_of(gco2_per_kwh)};
        auto answer = without_gil([&] { return ask(endpoint, key_folder, request, timeout_s); });
        return expect<wire::Costs>(unwrap(std::move(answer))).json;
      },
      py::arg("endpoint"), py::arg("key_folder"), py::arg("timeout_s"), py::kw_only(),
      py::arg("price_per_hour") = py::none(), py::arg("energy_price_per_kwh") = py::none(),
      py::arg("gco2_per_kwh") = py::none());
  module.def(
      "drain_worker",
      [](const std::string& endpoint, const std::optional<std::string>& key_folder, uint64_t worker_id,
         double timeout_s) {
        const wire::DrainRequest request{.worker_id = worker_id};
        auto answer = without_gil([&] { return ask(endpoint, key_folder, request, timeout_s); });
        return expect<wire::DrainAnswer>(unwrap(std::move(answer))).is_known;
      },
      py::arg("endpoint"), py::arg("key_folder"), py::arg("worker_id"), py::arg("timeout_s"));
  bind_scaling(module);
  module.def(
      "report_scale",
      [](const std::string& endpoint, const std::optional<std::string>& key_folder, const wire::ScaleReport& report,
         double timeout_s) {
        auto answer = without_gil([&] { return ask(endpoint, key_folder, report, timeout_s); });
        return expect<wire::ScaleOrders>(unwrap(std::move(answer)));
      },
      py::arg("endpoint"), py::arg("key_folder"), py::arg("report"), py::arg("timeout_s"));
  module.def(
      "end_pool",
      [](const std::string& endpoint, const std::optional<std::string>& key_folder, double timeout_s) {
        auto answer = without_gil([&] { return ask(endpoint, key_folder, wire::EndRequest{}, timeout_s); });
        return expect<wire::EndAnswer>(unwrap(std::move(answer))).has_engine;
      },
      py::arg("endpoint"), py::arg("key_folder"), py::arg("timeout_s"));
  module.def("draw_identity", [] { return unwrap(draw_identity()); });
}

}  // namespace penstock::bindings
