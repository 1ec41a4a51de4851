// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs the jobs of a trace on a cluster, event by event, and returns when each started and ended. Pure; the same
// arguments give the same outcome. Events are arrivals, ends, workers that start to work, and decisions at intervals.
// TrainerMeter counts the totals that a simulated trainer reports.
//
// Jobs get their GPUs as gangs, in the configured order, with a strict head of line: no job overtakes the first one. A
// job is placed on the server with the fewest free GPUs that has enough, else spread over the servers with the most.

#include <cstdint>
#include <vector>

#include "simulator/world.h"
#include "wire/reports.h"

namespace penstock::simulator {

struct JobOutcome {
  double start_s = 0;  // the first start
  double end_s = 0;
  double running_s = 0;
  uint32_t end_count = 0;  // must be 1

  friend bool operator==(const JobOutcome&, const JobOutcome&) = default;
};

struct Outcome {
  std::vector<JobOutcome> jobs{};
  double begin_s = 0;       // the first arrival
  double end_s = 0;         // the last end
  double gpu_held_s = 0;    // GPU-seconds
  double gpu_busy_s = 0;    // the part that is not starved
  double cpu_held_s = 0;    // CPU-seconds; none with infinite CPUs
  double cpu_busy_s = 0;    // the part that the job's speed can use
  uint64_t move_count = 0;  // workers that a pool job received after its first ones
  uint64_t preempt_count = 0;
  double moved_bytes = 0;  // over links
  uint64_t event_count = 0;

  friend bool operator==(const Outcome&, const Outcome&) = default;
};

// Jobs in order of arrival. kMalformed for an impossible world.
Result<Outcome> simulate(const std::vector<Job>& jobs, const std::vector<Profile>& profiles, const Cluster& cluster,
                         const Settings& settings);

// The rates of a trainer from one event to the next.
struct TrainerPace {
  double batches_per_s = 0;
  double step_s = 0;    // per batch, without waiting
  double worker_s = 0;  // of one worker, per batch
  double link_bytes_per_s = 0;
  double link_capacity_bytes_per_s = 0;  // 0: unknown, because the link is not full
  uint32_t worker_count = 0;
};

// The totals that a simulated trainer reports, as a live one would: its steps, its waiting, and the time that its
// workers took for batches. A value type.
class TrainerMeter {
 public:
  // Adds `seconds` at this pace.
  void advance(double seconds, const TrainerPace& pace);
  // The trainer's report after the last whole batch. `worker_count_max` is the limit of its pool.
  wire::TrainerReport report(uint32_t worker_count_max);

 private:
  double step_count_ = 0;
  double stepping_s_ = 0;
  double starved_s_ = 0;
  double made_s_ = 0;
  double made_bytes_ = 0;
  TrainerPace pace_{};  // the last
  wire::QueueSignal last_{};
};

}  // namespace penstock::simulator
