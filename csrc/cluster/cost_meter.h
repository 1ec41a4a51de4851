// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a trainer's workers spend on it, from the meters that they tell with each message. A worker's meter counts from
// the beginning of its process, so the trainer adds differences: what a worker spent before its welcome, for others,
// is no cost of this trainer's, and a message that is lost is made good by the next. Pure.

#include <cstddef>
#include <cstdint>
#include <map>

#include "base/instant.h"
#include "wire/reports.h"

namespace penstock::cluster {

// Thread-compatible.
class CostMeter {
 public:
  // A worker begins to serve, or to serve on a new link. With `is_continued` it has served in between.
  void welcomed(uint64_t worker_id, const wire::WorkerMeter& meter, bool is_continued, Instant now);
  // Any other message of a worker.
  void heard(uint64_t worker_id, const wire::WorkerMeter& meter, Instant now);
  // The trainer does without it from now on.
  void parted(uint64_t worker_id, Instant now);
  struct Batch {
    uint64_t sample_count = 0;
    uint64_t bytes = 0;
  };
  void came(const Batch& batch);

  const wire::JobCosts& totals() const { return totals_; }

 private:
  struct Tenancy {
    Instant begun_at{};
    wire::WorkerMeter meter{};
    Instant heard_at{};
    bool is_metered = false;
    uint64_t cpu_ns = 0;  // that were counted, and microjoules
    uint64_t energy_uj = 0;
  };

  void advance(Tenancy& tenancy, const wire::WorkerMeter& meter, Instant now);

  wire::JobCosts totals_;
  std::map<uint64_t, Tenancy> tenancies_;  // by worker; those that serve now
};

}  // namespace penstock::cluster
