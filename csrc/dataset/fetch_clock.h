// SPDX-License-Identifier: Apache-2.0
#pragma once
// Measures how long the samples of a batch take, without making the batch from them. The code that makes the batch
// reports when it collates, and when it copies a sample into the batch before that.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>

#include "base/clock.h"
#include "wire/message.h"

namespace penstock::dataset {

// Confined to the thread that makes the batch.
class FetchClock {
 public:
  // Call at the start of a batch.
  void begin(Instant now) { *this = FetchClock(now); }

  // Call after the next sample was fetched or copied into the batch.
  void note_sample(Duration time) {
    if (time > slowest_) {
      slowest_ = time;
      slowest_place_ = sample_count_;
    }
    if (sample_count_ < std::numeric_limits<uint16_t>::max()) ++sample_count_;
  }
  void note_copy(Duration time) { copying_ += time; }
  // Call when all samples have been fetched. A collate function may call another one.
  void begin_collate(Instant now) {
    if (!collate_begun_at_) collate_begun_at_ = now;
  }
  // Call after collating, if the batch was transformed into another one: this counts as the dataset's work.
  void note_transform(Duration time) { transforming_ += time; }

  struct Times {
    Duration dataset{0};
    Duration slowest{0};         // sample; 0 if samples were not timed
    uint16_t slowest_place = 0;  // in the batch

    wire::SampleTimes in_units() const {
      return {.dataset_time = wire::time_units(dataset),
              .slowest_place = slowest_place,
              .slowest_share = wire::share_units(slowest, dataset)};
    }
  };
  // Returns the times of a batch that was started at `begun_at`, possibly before begin(), and was finished at `now`.
  Times times(Instant begun_at, Instant now) const {
    const Duration fetching = collate_begun_at_.value_or(now) - begun_at - copying_;
    const Duration transforming = collate_begun_at_ ? transforming_ : Duration(0);
    const Duration dataset = std::max(Duration(0), fetching + transforming);
    return {.dataset = dataset, .slowest = std::min(slowest_, dataset), .slowest_place = slowest_place_};
  }
  Instant begun_at() const { return begun_at_; }

  FetchClock() = default;

 private:
  explicit FetchClock(Instant now) : begun_at_(now) {}

  Instant begun_at_{};
  std::optional<Instant> collate_begun_at_{};
  Duration copying_{0};
  Duration transforming_{0};
  Duration slowest_{0};
  uint16_t slowest_place_ = 0;
  uint16_t sample_count_ = 0;
};

}  // namespace penstock::dataset
