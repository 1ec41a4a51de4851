// SPDX-License-Identifier: Apache-2.0
#pragma once
// The results of simulated runs, and comparisons between policies over seeds. Pure.

#include <optional>
#include <span>
#include <vector>

#include "simulator/simulation.h"

namespace penstock::simulator {

// The results of one run. A completion time lasts from a job's arrival to its end, waiting and running.
struct Report {
  double completion_mean_s = 0;
  double completion_median_s = 0;
  double completion_p99_s = 0;
  double waiting_mean_s = 0;
  double running_mean_s = 0;
  double makespan_s = 0;                 // from the first arrival to the last end
  double gpu_allocated_share = 0;        // of the GPUs' time in the makespan
  double gpu_busy_share = 0;             // of the same time, allocated and not starved
  double cpu_used_share = 0;             // of the CPUs' time; 0 with infinite CPUs
  double operations_per_job_minute = 0;  // workers moved and jobs preempted, per minute of running jobs
  double moved_bytes = 0;                // over links
  std::vector<double> completions_s{};   // of each job, in order of arrival

  friend bool operator==(const Report&, const Report&) = default;
};

// `jobs` are the jobs of the outcome, at least one.
Report report_on(const std::vector<Job>& jobs, const Cluster& cluster, const Outcome& outcome);

// The speedup of one policy over another, from pairs of runs with the same seed: the mean of the ratios, and Student's
// 95 % confidence interval of the mean. One pair has no interval.
struct PairedSpeedup {
  double mean = 0;
  double least = 0;  // of the pairs
  double most = 0;
  std::optional<double> interval_low{};
  std::optional<double> interval_high{};
};

// kMalformed: the numbers of times differ or are 0, or a time is not positive.
Result<PairedSpeedup> paired_speedup(std::span<const double> other_s, std::span<const double> own_s);

// The gain in mean completion time over another policy, in seconds. The parts sum up to the gain.
struct GainParts {
  double waiting_s = 0;
  double running_s = 0;
};

GainParts gain_parts(const Report& other, const Report& own);

}  // namespace penstock::simulator
