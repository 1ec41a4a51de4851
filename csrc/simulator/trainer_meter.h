// SPDX-License-Identifier: Apache-2.0
#pragma once
// The totals that a simulated trainer reports, as a live one would: its steps, its waiting, and what its workers took
// for batches. A value type.

#include <cstdint>

#include "wire/reports.h"

namespace penstock::simulator {

// What goes on from one event to the next.
struct TrainerPace {
  double batches_per_s = 0;
  double step_s = 0;    // of a batch, waiting apart
  double worker_s = 0;  // of one worker, for a batch
  double link_bytes_per_s = 0;
  double link_capacity_bytes_per_s = 0;  // 0: it is not known, since the link is not full
  uint32_t worker_count = 0;
};

class TrainerMeter {
 public:
  // So long it went on.
  void advance(double seconds, const TrainerPace& pace);
  // What the trainer says after the last whole batch. `worker_count_max`: of its pool.
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
