// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many workers one pool job requests (DemandRule), and how many of a cluster's CPUs each running job then gets, by
// each of the policies that share them as a pool. A CPU is a worker. Pure.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "simulator/world.h"
#include "wire/reports.h"

namespace penstock::simulator {

constexpr Duration kCachewPeriod = std::chrono::seconds(10);
constexpr Duration kRayRequestGap = std::chrono::seconds(10);
constexpr Duration kRayIdleTime = std::chrono::seconds(180 + 300);  // lifetime of a request, plus idle time of nodes

// How many workers one pool job requests: takes its trainer's reports and the time, returns a count. A report is the
// one that a live trainer sends to its controller; a job with several GPUs reports as one trainer that takes a batch
// for each of them.
//
//   penstock         scheduling::JobScaler, the code that a pool runs
//   tf-data-service  as many as the trainer's rate needs, at most four times the current number
//   cachew           one more while batches arrive more than 7 % faster, in periods of kCachewPeriod
//   ray-data         twice as many while at least half of them are at work; fewer only after a long idle time
//
// The last three are our interpretation of these systems' rules; README.md lists the omitted parts of the systems.
//
// Thread-compatible.
class DemandRule {
 public:
  virtual ~DemandRule() = default;
  // The trainer reports and has `worker_count` workers. Returns whether the pool must be allocated again.
  virtual bool note(const wire::TrainerReport& report, uint32_t worker_count, Instant now) = 0;
  virtual uint32_t demand() const = 0;
  // The part of the demand that is not spare.
  virtual uint32_t busy_count() const { return demand(); }
  // The share of its full speed, from 0 to 1, that the job has with this many workers, as far as the rule knows.
  virtual double progress(uint32_t worker_count) const = 0;
  // The time until the rule needs the next report; none: a decision at each interval of the settings is enough.
  virtual std::optional<Duration> wants_report_in() const = 0;
};

// For a new job. `policy` must be a pool policy.
std::unique_ptr<DemandRule> make_demand_rule(CpuPolicy policy, const Job& job, const Cluster& cluster);

struct PooledJob {
  uint64_t job_id = 0;
  uint32_t gpus = 1;
  uint32_t count = 0;  // current CPUs
  const DemandRule* rule = nullptr;
};

// The number of CPUs of each running job; `jobs` are in the order in which they started. `penstock` allocates with
// scheduling::gpu_progress, as a pool does. The other systems' rules each concern a single job: every job is guaranteed
// one CPU per GPU, and the rest is granted in that order.
std::vector<uint32_t> pooled_counts(CpuPolicy policy, std::span<const PooledJob> jobs, uint32_t cpu_count,
                                    const Settings& settings);

// Synergy's tuning within one server: each job gets its demand if all demands fit; otherwise the job with the largest
// excess over its share is reduced, at most to that share, and then the next one, until they fit.
std::vector<double> tuned_counts(std::span<const double> demands, std::span<const double> shares, double cpu_count);

}  // namespace penstock::simulator
