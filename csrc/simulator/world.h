// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is simulated: jobs, the models that they train, and the servers that they run on. Values only.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "cluster/allocation.h"

namespace penstock::simulator {

// Speed of a job by CPUs for each of its GPUs, in units of the speed that its duration was measured at.
struct Profile {
  std::string model{};
  std::string model_class{};     // image, language, speech or other
  double iteration_s = 1;        // at speed 1
  double batch = 1;              // samples of an iteration of one GPU
  double sample_bytes = 0;       // that a worker sends for a sample
  std::vector<double> speeds{};  // with 1, 2, 3 ... CPUs a GPU; not decreasing

  // Linear between the points, and from nothing without CPUs.
  double speed(double cpus_per_gpu) const;
  double speed_max() const { return speeds.back(); }
  // The fewest CPUs a GPU with which it is as fast as it gets.
  double cpus_needed() const;
  double bytes_per_s() const { return batch * sample_bytes / iteration_s; }  // of one GPU at speed 1
};

struct Job {
  double submit_s = 0;
  double duration_s = 0;  // at speed 1
  uint32_t gpus = 1;
  std::string model{};  // empty: it is drawn by the split
  size_t profile = 0;   // as assigned
};

struct Cluster {
  uint32_t server_count = 8;
  uint32_t gpus_per_server = 8;
  uint32_t cpus_per_gpu = 3;
  double link_bytes_per_s = 1.25e9;  // into each server; its GPUs have equal shares of it

  uint32_t gpu_count() const { return server_count * gpus_per_server; }
  uint32_t cpus_per_server() const { return gpus_per_server * cpus_per_gpu; }
  uint32_t cpu_count() const { return server_count * cpus_per_server(); }
};

enum class GpuOrder : uint8_t { kFifo, kSrtf };

enum class CpuPolicy : uint8_t { kProportional, kTuned, kTfDataService, kCachew, kRayData, kPenstock, kInfinite };

inline constexpr std::array<std::string_view, 7> kCpuPolicyNames{
    "proportional", "tuned", "tf-data-service", "cachew", "ray-data", "penstock", "infinite"};
std::optional<CpuPolicy> cpu_policy_named(std::string_view name);

struct Settings {
  GpuOrder order = GpuOrder::kFifo;
  bool preempts = false;       // of kSrtf alone
  double restart_cost_s = 60;  // of work, for a job that was preempted
  CpuPolicy cpus = CpuPolicy::kProportional;
  double start_delay_s = 5;                      // from when a worker is given to a job until it works
  double move_cost_s = cluster::kPoolMoveCostS;  // that penstock's policy reckons with for a move
  double interval_s = 60;                        // between looks at a job of a pool that has settled
  double horizon_s = cluster::kPoolHorizonS;     // over which the gain of a move is counted
  double floor_share = cluster::kPoolFloorShare;
  double noise = 0.1;  // standard deviation of the logarithm of what is measured
  uint64_t seed = 0;
};

// Shares of image, language and speech. Gives each job that names no model one of its class, at random by the seed.
Result<void> assign_models(std::vector<Job>& jobs, const std::vector<Profile>& profiles, std::array<double, 3> split,
                           uint64_t seed);
// A world that cannot be simulated, in a sentence.
Result<void> check_world(const std::vector<Job>& jobs, const std::vector<Profile>& profiles, const Cluster& cluster,
                         const Settings& settings);

}  // namespace penstock::simulator
