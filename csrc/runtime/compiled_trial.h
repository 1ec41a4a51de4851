// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decides whether compiled code replaces the executor: only if it gives the same bits on every batch that is compared,
// and takes less time. Both run for the first batches, and then for one batch in kCompareEvery; a difference is final.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace penstock::runtime {

// Pure. Confined to one thread.
class CompiledTrial {
 public:
  static constexpr size_t kWarmups = 2;  // compared, not timed
  static constexpr size_t kTimed = 9;    // compared and timed
  static constexpr double kGain = 0.95;  // maximal time, as a fraction of the executor's
  static constexpr uint64_t kCompareEvery = 64;

  enum class Choice : uint8_t { kBoth, kCompiled, kExecutor };

  // Returns the code to run for the next batch.
  Choice next() {
    if (state_ == State::kRefused) return Choice::kExecutor;
    if (state_ == State::kTrying) return Choice::kBoth;
    return ++used_count_ % kCompareEvery == 0 ? Choice::kBoth : Choice::kCompiled;
  }

  // Call after running both.
  void note(bool is_same, double executor_s, double compiled_s) {
    if (!is_same) return refuse();
    if (state_ != State::kTrying || compared_count_++ < kWarmups) return;
    const size_t index = compared_count_ - kWarmups - 1;
    executor_s_[index] = executor_s;
    compiled_s_[index] = compiled_s;
    if (index + 1 < kTimed) return;
    state_ = median(compiled_s_) < kGain * median(executor_s_) ? State::kUsed : State::kRefused;
  }

  // Call if the compiled code is wrong or has failed.
  void refuse() { state_ = State::kRefused; }

  bool is_used() const { return state_ == State::kUsed; }
  bool is_refused() const { return state_ == State::kRefused; }

 private:
  enum class State : uint8_t { kTrying, kUsed, kRefused };
  using Seconds = std::array<double, kTimed>;

  static double median(Seconds seconds) {
    std::nth_element(seconds.begin(), seconds.begin() + kTimed / 2, seconds.end());
    return seconds[kTimed / 2];
  }

  State state_ = State::kTrying;
  size_t compared_count_ = 0;
  uint64_t used_count_ = 0;
  Seconds executor_s_{};
  Seconds compiled_s_{};
};

}  // namespace penstock::runtime
