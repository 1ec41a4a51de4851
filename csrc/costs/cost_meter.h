// SPDX-License-Identifier: Apache-2.0
#pragma once
// The resources that workers spend on a trainer, from the meter readings in their messages. A worker's meter counts
// from the start of its process, so the trainer adds differences: resources that a worker spent before its welcome, for
// others, are not charged to this trainer, and the next message makes up for a lost one. Pure.

#include <cstddef>
#include <cstdint>
#include <map>

#include "base/instant.h"
#include "wire/reports.h"

namespace penstock::costs {

// Thread-compatible.
class CostMeter {
 public:
  // A worker starts to serve, or continues on a new link. With `is_continued` it has served in between.
  void welcomed(uint64_t worker_id, const wire::WorkerMeter& meter, bool is_continued, Instant now);
  // Any other message from a worker.
  void heard(uint64_t worker_id, const wire::WorkerMeter& meter, Instant now);
  // The trainer no longer uses the worker from now on.
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
    uint64_t cpu_ns = 0;  // counted so far, as is the energy in microjoules
    uint64_t energy_uj = 0;
  };

  void advance(Tenancy& tenancy, const wire::WorkerMeter& meter, Instant now);

  wire::JobCosts totals_;
  std::map<uint64_t, Tenancy> tenancies_;  // by worker, for the workers that serve now
};

}  // namespace penstock::costs
