// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many workers one job of a pool asks for. Pure: the reports of its trainer and the time in, a count out. A report
// is what a live trainer sends to its controller; a job with several GPUs reports as one trainer that takes a batch for
// each of them.
//
//   penstock         cluster::JobScaler, the code that a pool runs
//   tf-data-service  as many as the trainer's rate needs, at most four times those that there are
//   cachew           one more while batches come more than 7 % faster, in periods of kCachewPeriod
//   ray-data         twice as many while half of them or more are at work; down only once they were idle for long
//
// The last three are a reading of these systems' rules; README.md says what of the systems is left out.

#include <cstdint>
#include <memory>
#include <optional>

#include "base/instant.h"
#include "simulator/world.h"
#include "wire/reports.h"

namespace penstock::simulator {

constexpr Duration kCachewPeriod = std::chrono::seconds(10);
constexpr Duration kRayRequestGap = std::chrono::seconds(10);
constexpr Duration kRayIdleTime = std::chrono::seconds(180 + 300);  // a request is kept, then the nodes idle

// Thread-compatible.
class DemandRule {
 public:
  virtual ~DemandRule() = default;
  // The trainer reports; `worker_count` workers are its. Returns whether the pool is to be shared out anew.
  virtual bool note(const wire::TrainerReport& report, uint32_t worker_count, Instant now) = 0;
  virtual uint32_t demand() const = 0;
  // Of them, those that are not to spare.
  virtual uint32_t busy_count() const { return demand(); }
  // The share of its full speed, from 0 to 1, that it has with so many workers, as far as the rule knows.
  virtual double progress(uint32_t worker_count) const = 0;
  // After how long it wants the next report; none: a decision at each of the settings' intervals is enough.
  virtual std::optional<Duration> wants_report_in() const = 0;
};

// For a new job. `policy` is one of a pool.
std::unique_ptr<DemandRule> make_demand_rule(CpuPolicy policy, const Job& job, const Cluster& cluster);

}  // namespace penstock::simulator
