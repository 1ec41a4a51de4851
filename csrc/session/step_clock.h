// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a trainer's time is divided between its batches: training steps, waiting for batches, and pauses. A pause is time
// that does not depend on the loader: the first steps of a program, which load and compile; a step that takes many
// times as long as most, such as an evaluation or a checkpoint; the time between epochs; and the wait for the first
// batch of an epoch, which more workers would not shorten. Pure.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"

namespace penstock::session {

constexpr size_t kWarmUpSteps = 3;
constexpr int kPauseFactor = 10;                                // times the median step
constexpr Duration kPauseMin = std::chrono::milliseconds(100);  // a shorter step is never a pause

struct StepTimes {
  uint64_t step_count = 0;
  Duration stepping{};  // in steps, without waiting
  Duration starved{};   // waiting for the batch after a step; the wait after a pause is part of the pause
  Duration paused{};
};

// Thread-compatible.
class StepClock {
 public:
  // The program receives a batch of the epoch; so far it has waited for batches for `waited_total` since its start.
  void give(Instant now, Duration waited_total) {
    const Duration waited = waited_total - waited_total_;
    if (is_in_epoch_) {
      const Duration step = std::max(Duration(0), now - given_at_ - waited);
      if (step >= pause_min()) {
        times_.paused += step + waited;
      } else {
        ++times_.step_count;
        times_.stepping += step;
        times_.starved += waited;
      }
      note(step);
    } else {
      times_.paused += waited;
    }
    is_in_epoch_ = true;
    given_at_ = now;
    waited_total_ = waited_total;
  }
  // The epoch is over, or was abandoned.
  void end_epoch() { is_in_epoch_ = false; }

  const StepTimes& times() const { return times_; }
  bool is_in_epoch() const { return is_in_epoch_; }
  Instant given_at() const { return given_at_; }
  // A step that takes at least this long is a pause; zero while the program warms up, during which every step is one.
  Duration pause_min() const { return pause_min_; }

 private:
  static constexpr size_t kKeptCount = 32;

  // Pauses are included in the median's steps: if every step of a program becomes longer, it has no pauses. The median
  // is computed once per kKeptCount steps, so that its cost per step is negligible.
  void note(Duration step) {
    if (seen_count_ < kWarmUpSteps) {
      if (++seen_count_ == kWarmUpSteps) pause_min_ = Duration::max();
      return;
    }
    kept_[kept_count_++] = step;
    if (kept_count_ < kKeptCount && pause_min_ != Duration::max()) return;
    const auto middle = kept_.begin() + static_cast<std::ptrdiff_t>(kept_count_ / 2);
    std::nth_element(kept_.begin(), middle, kept_.begin() + static_cast<std::ptrdiff_t>(kept_count_));
    pause_min_ = std::max(kPauseMin, kPauseFactor * *middle);
    if (kept_count_ == kKeptCount) kept_count_ = 0;
  }

  StepTimes times_;
  bool is_in_epoch_ = false;
  Instant given_at_{};
  Duration waited_total_{};
  size_t seen_count_ = 0;  // number of first steps
  std::array<Duration, kKeptCount> kept_{};
  size_t kept_count_ = 0;
  Duration pause_min_{};
};

}  // namespace penstock::session
