// SPDX-License-Identifier: Apache-2.0
// The Python module penstock_simulator._simulator. Like penstock._pool, it does not link torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "bindings/raise.h"
#include "simulator/report.h"
#include "simulator/simulation.h"
#include "simulator/world.h"

namespace py = pybind11;

namespace penstock::bindings {

using namespace simulator;

namespace {

Result<Report> simulate_once(const JobTable& table, const ProfileTable& models, const Cluster& cluster,
                             const Settings& settings, const std::array<double, 3>& split) {
  std::vector<Job> jobs = table.jobs;
  if (auto assigned = assign_models(jobs, models.profiles, split, settings.seed); !assigned) return assigned.error();
  auto outcome = simulate(jobs, models.profiles, cluster, settings);
  if (!outcome) return outcome.error();
  return report_on(jobs, cluster, outcome.value());
}

CpuPolicy policy_of(const std::string& name) {
  const auto policy = cpu_policy_named(name);
  if (!policy) throw py::value_error("the policy '" + name + "' is unknown; use one of CPU_POLICIES");
  return *policy;
}

GpuOrder order_of(const std::string& name) {
  if (name != "fifo" && name != "srtf") throw py::value_error("the order '" + name + "' is unknown; use fifo or srtf");
  return name == "fifo" ? GpuOrder::kFifo : GpuOrder::kSrtf;
}

void bind_simulator(py::module_& module) {
  module.attr("CPU_POLICIES") = py::cast(kCpuPolicyNames);
  module.attr("POOL_FLOOR_SHARE") = scheduling::kPoolFloorShare;
  module.attr("POOL_MOVE_COST_S") = scheduling::kPoolMoveCostS;
  module.attr("POOL_HORIZON_S") = scheduling::kPoolHorizonS;

  py::class_<JobTable>(module, "JobTable")
      .def_static(
          "parse",
          [](const std::string& file, const std::string& text, const std::string& vc, double duration_min_s,
             uint32_t gpus_max, size_t job_skip_count, size_t job_count_max) {
            const JobFilter filter{vc, duration_min_s, gpus_max, job_skip_count, job_count_max};
            return unwrap(without_gil([&] { return parse_jobs(file, text, filter); }));
          },
          py::arg("file"), py::arg("text"), py::kw_only(), py::arg("vc"), py::arg("duration_min_s"),
          py::arg("gpus_max"), py::arg("job_skip_count"), py::arg("job_count_max"))
      .def_static(
          "synthetic",
          [](size_t job_count, uint32_t gpu_count, double load, uint64_t seed) {
            return unwrap(without_gil([&] { return synthetic_jobs({job_count, gpu_count, load, seed}); }));
          },
          py::kw_only(), py::arg("job_count"), py::arg("gpu_count"), py::arg("load"), py::arg("seed"))
      .def("__len__", [](const JobTable& self) { return self.jobs.size(); });

  py::class_<ProfileTable>(module, "ProfileTable")
      .def_static(
          "parse",
          [](const std::string& file, const std::string& text) {
            return unwrap(without_gil([&] { return parse_profiles(file, text); }));
          },
          py::arg("file"), py::arg("text"))
      .def("__len__", [](const ProfileTable& self) { return self.profiles.size(); });

  py::class_<Report>(module, "SimulationReport")
      .def_readonly("completion_mean_s", &Report::completion_mean_s)
      .def_readonly("completion_median_s", &Report::completion_median_s)
      .def_readonly("completion_p99_s", &Report::completion_p99_s)
      .def_readonly("waiting_mean_s", &Report::waiting_mean_s)
      .def_readonly("running_mean_s", &Report::running_mean_s)
      .def_readonly("makespan_s", &Report::makespan_s)
      .def_readonly("gpu_allocated_share", &Report::gpu_allocated_share)
      .def_readonly("gpu_busy_share", &Report::gpu_busy_share)
      .def_readonly("cpu_used_share", &Report::cpu_used_share)
      .def_readonly("operations_per_job_minute", &Report::operations_per_job_minute)
      .def_readonly("moved_bytes", &Report::moved_bytes)
      .def_readonly("completions_s", &Report::completions_s);

  py::class_<PairedSpeedup>(module, "PairedSpeedup")
      .def_readonly("mean", &PairedSpeedup::mean)
      .def_readonly("least", &PairedSpeedup::least)
      .def_readonly("most", &PairedSpeedup::most)
      .def_readonly("interval_low", &PairedSpeedup::interval_low)
      .def_readonly("interval_high", &PairedSpeedup::interval_high);

  module.def(
      "simulate",
      [](const JobTable& jobs, const ProfileTable& profiles, uint32_t server_count, uint32_t gpus_per_server,
         uint32_t cpus_per_gpu, double link_bytes_per_s, const std::array<double, 3>& split, const std::string& order,
         bool preempts, const std::string& policy, double start_delay_s, double move_cost_s, double interval_s,
         double horizon_s, double floor_share, double noise, uint64_t seed) {
        const Cluster cluster{server_count, gpus_per_server, cpus_per_gpu, link_bytes_per_s};
        const Settings settings{.order = order_of(order),
                                .preempts = preempts,
                                .cpus = policy_of(policy),
                                .start_delay_s = start_delay_s,
                                .move_cost_s = move_cost_s,
                                .interval_s = interval_s,
                                .horizon_s = horizon_s,
                                .floor_share = floor_share,
                                .noise = noise,
                                .seed = seed};
        return unwrap(without_gil([&] { return simulate_once(jobs, profiles, cluster, settings, split); }));
      },
      py::arg("jobs"), py::arg("profiles"), py::kw_only(), py::arg("server_count"), py::arg("gpus_per_server"),
      py::arg("cpus_per_gpu"), py::arg("link_bytes_per_s"), py::arg("split"), py::arg("order"), py::arg("preempts"),
      py::arg("policy"), py::arg("start_delay_s"), py::arg("move_cost_s"), py::arg("interval_s"), py::arg("horizon_s"),
      py::arg("floor_share"), py::arg("noise"), py::arg("seed"));
  module.def(
      "paired_speedup",
      [](const std::vector<double>& other_s, const std::vector<double>& own_s) {
        return unwrap(paired_speedup(other_s, own_s));
      },
      py::arg("other_s"), py::arg("own_s"));
  module.def(
      "gain_parts",
      [](const Report& other, const Report& own) {
        const GainParts parts = gain_parts(other, own);
        return std::pair(parts.waiting_s, parts.running_s);
      },
      py::arg("other"), py::arg("own"));
}

}  // namespace
}  // namespace penstock::bindings

PYBIND11_MODULE(_simulator, module) {
  module.doc() = "The native part of penstock-simulator: a cluster's jobs in simulated time.";
  penstock::bindings::bind_simulator(module);
}
