// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a trainer fares, as its own thread sees it, for the thread that reports to a pool's controller.

#include <cstdint>

#include "base/instant.h"
#include "cluster/step_clock.h"

namespace penstock::loader {

struct TrainerPace {
  uint32_t stored_count = 0;  // batches that its thread has and has not given to the program
  uint32_t wanted_count = 0;  // that are to be here, or asked for
  cluster::StepTimes steps{};
  bool is_in_epoch = false;
  Instant given_at{};    // the last batch
  Duration pause_min{};  // as StepClock's
};

}  // namespace penstock::loader
