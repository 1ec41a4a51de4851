// SPDX-License-Identifier: Apache-2.0
#pragma once
// The simulated world: jobs, the models that they train, and the servers that they run on. Values only.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "scheduling/allocation.h"

namespace penstock::simulator {

// A job's speed by the number of CPUs for each of its GPUs, in units of the speed at which its duration was measured.
struct Profile {
  std::string model{};
  std::string model_class{};     // image, language, speech or other
  double iteration_s = 1;        // at speed 1
  double batch = 1;              // samples per iteration of one GPU
  double sample_bytes = 0;       // that a worker sends per sample
  std::vector<double> speeds{};  // with 1, 2, 3 ... CPUs per GPU; not decreasing

  // Linear between the points, and 0 without CPUs.
  double speed(double cpus_per_gpu) const;
  double speed_max() const { return speeds.back(); }
  // The smallest number of CPUs per GPU at which the job reaches its full speed.
  double cpus_needed() const;
  double bytes_per_s() const { return batch * sample_bytes / iteration_s; }  // of one GPU at speed 1
};

struct Job {
  double submit_s = 0;
  double duration_s = 0;  // at speed 1
  uint32_t gpus = 1;
  std::string model{};  // empty: drawn by the split
  size_t profile = 0;   // as assigned
};

struct Cluster {
  uint32_t server_count = 8;
  uint32_t gpus_per_server = 8;
  uint32_t cpus_per_gpu = 3;
  double link_bytes_per_s = 1.25e9;  // into each server; its GPUs share it equally

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
  bool preempts = false;       // only kSrtf
  double restart_cost_s = 60;  // of work, for a preempted job
  CpuPolicy cpus = CpuPolicy::kProportional;
  double start_delay_s = 5;                         // from the assignment of a worker to a job until it works
  double move_cost_s = scheduling::kPoolMoveCostS;  // that penstock's policy assumes for a move
  double interval_s = 60;                           // between decisions about a settled pool job
  double horizon_s = scheduling::kPoolHorizonS;     // over which the gain of a move is counted
  double floor_share = scheduling::kPoolFloorShare;
  double noise = 0.1;  // standard deviation of the logarithm of measured values
  uint64_t seed = 0;
};

// Assigns each job that names no model a model of its class, at random by the seed. `split` has the shares of image,
// language and speech.
Result<void> assign_models(std::vector<Job>& jobs, const std::vector<Profile>& profiles, std::array<double, 3> split,
                           uint64_t seed);
// Returns an error with a message for a world that cannot be simulated.
Result<void> check_world(const std::vector<Job>& jobs, const std::vector<Profile>& profiles, const Cluster& cluster,
                         const Settings& settings);

}  // namespace penstock::simulator
