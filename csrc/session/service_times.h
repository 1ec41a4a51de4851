// SPDX-License-Identifier: Apache-2.0
#pragma once
// How long a worker takes per batch, for the last few batches that a pool answered: a mean for each worker, and a
// quantile over all workers, beyond which a batch counts as late.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "base/instant.h"

namespace penstock::session {

// Forgets gradually: after `1 / kNewShare` batches the weight of the earlier ones is a third. A value type.
class MeanTime {
 public:
  void add(Duration time) {
    mean_ = mean_ ? *mean_ + std::chrono::duration_cast<Duration>((time - *mean_) * kNewShare) : time;
  }
  std::optional<Duration> value() const { return mean_; }

 private:
  static constexpr double kNewShare = 0.2;
  std::optional<Duration> mean_;
};

// The last kCount times. A value type.
class RecentTimes {
 public:
  static constexpr size_t kCount = 64;

  void add(Duration time) {
    times_[added_count_ % kCount] = time;
    ++added_count_;
  }

  size_t count() const { return std::min<uint64_t>(added_count_, kCount); }

  // The time that a `share` of them does not exceed; needs at least one.
  Duration quantile(double share) const {
    std::array<Duration, kCount> sorted = times_;
    const auto end = sorted.begin() + static_cast<ptrdiff_t>(count());
    const auto place = sorted.begin() + static_cast<ptrdiff_t>(share * static_cast<double>(count() - 1));
    std::nth_element(sorted.begin(), place, end);
    return *place;
  }

 private:
  std::array<Duration, kCount> times_{};
  uint64_t added_count_ = 0;
};

}  // namespace penstock::session
