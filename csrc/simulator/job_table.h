// SPDX-License-Identifier: Apache-2.0
#pragma once
// The simulated jobs: from a trace, or synthetic. Pure; a caller reads the file.
//
// A trace is CSV with the columns submit_s,duration_s,num_gpus,vc and optionally model. `vc` names the virtual cluster
// to which a job was submitted, and `model` a profile; where it is empty one is drawn. Seconds count from an arbitrary
// origin. The rows may be in any order.

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "simulator/world.h"

namespace penstock::simulator {

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

// `file` is a name for messages. kMalformed: names the line, its fault and the remedy; also if no jobs remain.
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

}  // namespace penstock::simulator
