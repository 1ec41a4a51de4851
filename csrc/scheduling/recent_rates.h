// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many batches per second a trainer received recently, and the share of that time in which it waited for them. A
// trainer reports totals; the rates cover the reports within the last kRateWindow. Pure.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>

#include "base/instant.h"
#include "wire/reports.h"

namespace penstock::scheduling {

constexpr Duration kRateWindow = std::chrono::seconds(10);
// Reports that arrive more often than this are not all kept, which limits how many a trainer can cause to be kept.
constexpr Duration kRateStep = std::chrono::milliseconds(250);
// A rate over a shorter time would cover only a few batches.
constexpr Duration kRateSpanMin = std::chrono::seconds(1);

// Thread-compatible.
class RecentRates {
 public:
  void note(const wire::QueueSignal& queue, Instant now) {
    const Sample sample{.at = now, .delivered_batches = queue.delivered_batches, .waited_ns = queue.waited_ns};
    if (!samples_.empty() &&
        (sample.delivered_batches < latest_.delivered_batches || sample.waited_ns < latest_.waited_ns))
      samples_.clear();  // the counters were reset
    latest_ = sample;
    if (samples_.empty() || now - samples_.back().at >= kRateStep) samples_.push_back(sample);
    while (now - samples_.front().at > kRateWindow) samples_.pop_front();
  }

  // Nullopt until the reports cover kRateSpanMin.
  std::optional<double> batches_per_s() const {
    if (span() < kRateSpanMin) return std::nullopt;
    return static_cast<double>(latest_.delivered_batches - samples_.front().delivered_batches) / seconds(span());
  }
  // The share of the time in which the trainer waited for batches, from 0 to 1. Nullopt as above.
  std::optional<double> waited_share() const {
    if (span() < kRateSpanMin) return std::nullopt;
    const double waited_s = static_cast<double>(latest_.waited_ns - samples_.front().waited_ns) / 1e9;
    return std::min(1.0, waited_s / seconds(span()));
  }

 private:
  struct Sample {
    Instant at{};
    uint64_t delivered_batches = 0;
    uint64_t waited_ns = 0;
  };

  static double seconds(Duration time) { return std::chrono::duration<double>(time).count(); }
  Duration span() const { return samples_.empty() ? Duration{} : latest_.at - samples_.front().at; }

  std::deque<Sample> samples_;  // oldest first; at most kRateWindow / kRateStep + 2
  Sample latest_{};
};

}  // namespace penstock::scheduling
