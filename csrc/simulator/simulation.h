// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs the jobs of a trace on a cluster, event by event, and says when each began and ended. Pure; the same arguments
// give the same outcome. Events are arrivals, ends, workers that begin to work, and decisions at intervals.
//
// GPUs go to jobs as gangs, in the order that is set, with a strict head of line: nobody overtakes the first one. A job
// is put on the server with the fewest free GPUs that has enough, else spread over those with the most.

#include <cstdint>
#include <vector>

#include "simulator/world.h"

namespace penstock::simulator {

struct JobOutcome {
  double start_s = 0;  // first
  double end_s = 0;
  double running_s = 0;
  uint32_t end_count = 0;  // 1

  friend bool operator==(const JobOutcome&, const JobOutcome&) = default;
};

struct Outcome {
  std::vector<JobOutcome> jobs{};
  double begin_s = 0;       // the first arrival
  double end_s = 0;         // the last end
  double gpu_held_s = 0;    // GPU-seconds
  double gpu_busy_s = 0;    // of them, not starved
  double cpu_held_s = 0;    // CPU-seconds; none with infinite CPUs
  double cpu_busy_s = 0;    // of them, those that the job's speed has a use for
  uint64_t move_count = 0;  // workers that were given to a job of a pool after its first ones
  uint64_t preempt_count = 0;
  double moved_bytes = 0;  // over links
  uint64_t event_count = 0;

  friend bool operator==(const Outcome&, const Outcome&) = default;
};

// Jobs in order of their arrival. kMalformed for a world that cannot be.
Result<Outcome> simulate(const std::vector<Job>& jobs, const std::vector<Profile>& profiles, const Cluster& cluster,
                         const Settings& settings);

}  // namespace penstock::simulator
