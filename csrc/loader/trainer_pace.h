// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's pace, as observed by its own thread, for the thread that reports to a pool's controller.

#include <cstdint>

#include "base/instant.h"
#include "session/step_clock.h"

namespace penstock::loader {

struct TrainerPace {
  uint32_t stored_count = 0;  // batches that the trainer's thread has and the program has not received
  uint32_t wanted_count = 0;  // target for batches that are here or requested
  session::StepTimes steps{};
  bool is_in_epoch = false;
  Instant given_at{};    // the time of the last delivery
  Duration pause_min{};  // see StepClock
};

}  // namespace penstock::loader
