// SPDX-License-Identifier: Apache-2.0
#pragma once
// The simulated world: jobs, the models that they train, the servers that they run on, and the settings of a run; and
// how jobs and models' profiles are read from CSV tables, or jobs drawn at random. Pure; a caller reads the files.
//
// A table has no quotes. Empty lines and lines that start with '#' are skipped.

#include <array>
#include <cstddef>
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

inline constexpr size_t kTableJobsMax = 1'000'000;

struct JobTable {
  std::vector<Job> jobs{};  // in order of arrival
};

struct JobFilter {
  std::string vc{};           // empty: all
  double duration_min_s = 0;  // shorter jobs are left out
  uint32_t gpus_max = 0;      // larger jobs are left out
  size_t job_skip_count = 0;  // how many of the remaining jobs are skipped, from the first
  size_t job_count_max = 0;   // how many of the jobs after them are kept; 0: all
};

// Reads a trace: CSV with the columns submit_s,duration_s,num_gpus,vc and optionally model. `vc` names the virtual
// cluster to which a job was submitted, and `model` a profile; where it is empty one is drawn. Seconds count from an
// arbitrary origin. The rows may be in any order. `file` is a name for messages. kMalformed: names the line, its fault
// and the remedy; also if no jobs remain.
Result<JobTable> parse_jobs(std::string_view file, std::string_view text, const JobFilter& filter);

// Jobs with Poisson arrivals, scaled so that the GPUs would be in use for `load` of the time between the first and the
// last arrival. Durations are log-normal with a median of an hour.
struct SyntheticJobs {
  size_t job_count = 500;
  uint32_t gpu_count = 64;
  double load = 1.0;
  uint64_t seed = 0;
};

Result<JobTable> synthetic_jobs(const SyntheticJobs& options);

inline constexpr size_t kTableCpusMax = 1024;  // columns

struct ProfileTable {
  std::vector<Profile> profiles{};
};

// Reads the models' profiles:
//
//   model,class,iteration_s,batch,sample_bytes,cpu1,cpu2,...  sample_bytes is optional; without it links are unused
//
// `class` is image, language, speech or other. `cpuN` is the speed of a GPU with N CPUs, in any unit that is the same
// for a model; `iteration_s` is the time of an iteration at speed 1, at which a job's duration is measured.
//
// `file` is a name for messages. kMalformed: names the line, its fault and the remedy.
Result<ProfileTable> parse_profiles(std::string_view file, std::string_view text);

}  // namespace penstock::simulator
