// SPDX-License-Identifier: Apache-2.0
#pragma once
// The totals that a simulated trainer reports, as a live one would: its steps, its waiting, and the time that its
// workers took for batches. A value type.

#include <cstdint>

#include "wire/reports.h"

namespace penstock::simulator {

// The rates from one event to the next.
struct TrainerPace {
  double batches_per_s = 0;
  double step_s = 0;    // per batch, without waiting
  double worker_s = 0;  // of one worker, per batch
  double link_bytes_per_s = 0;
  double link_capacity_bytes_per_s = 0;  // 0: unknown, because the link is not full
  uint32_t worker_count = 0;
};

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
