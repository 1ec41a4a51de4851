// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where a trainer's time goes between its batches: steps of training, waiting for batches, and pauses. A pause is
// whatever says nothing about the loader: the first steps of a program, which load and compile; a step that is many
// times as long as most, such as an evaluation or a checkpoint; the time between epochs; and the wait for the first
// batch of an epoch, which more workers would not shorten. Pure.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "base/instant.h"

namespace penstock::cluster {

constexpr size_t kWarmUpSteps = 3;
constexpr int kPauseFactor = 10;                                // times the median step
constexpr Duration kPauseMin = std::chrono::milliseconds(100);  // a shorter step is none, however short most are

struct StepTimes {
  uint64_t step_count = 0;
  Duration stepping{};  // in steps, waiting apart
  Duration starved{};   // waiting for the batch after a step; the wait after a pause is part of the pause
  Duration paused{};
};

// Thread-compatible.
class StepClock {
 public:
  // A batch of the epoch is given to the program, which has waited for batches for `waited_total` since it began.
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
  // The epoch is over, or was left.
  void end_epoch() { is_in_epoch_ = false; }

  const StepTimes& times() const { return times_; }
  bool is_in_epoch() const { return is_in_epoch_; }
  Instant given_at() const { return given_at_; }
  // A step that takes as long is a pause; zero while the program warms up, whose every step is one.
  Duration pause_min() const { return pause_min_; }

 private:
  static constexpr size_t kKeptCount = 32;

  // Pauses are among the steps that the median is of: a program whose every step becomes longer has no pauses. It is
  // worked out once in kKeptCount steps, so that it costs a step next to nothing.
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
  size_t seen_count_ = 0;  // of the first steps
  std::array<Duration, kKeptCount> kept_{};
  size_t kept_count_ = 0;
  Duration pause_min_{};
};

}  // namespace penstock::cluster
