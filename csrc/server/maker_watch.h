// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whether the thread of a worker that makes batches is of use: it waits for work, or makes a batch that somebody wants,
// however long that takes. A batch that nobody wants any more may never end: its sample may wait for a disk that is
// gone, or hold the interpreter's lock in a loop. Pure. The simulated workers of tests/sim run it too.

#include <algorithm>
#include <optional>

#include "base/instant.h"

namespace penstock::server {

// For how long a worker may be at a batch that nobody wants before it counts as stuck, and before its process is ended.
// Either is longer where the trainer's batches take longer.
constexpr Duration kStuckAfter = std::chrono::seconds(2);
constexpr Duration kAbandonedGrace = std::chrono::seconds(10);
// Before its process is ended at the first batch that it makes for a trainer: it may import modules and open an index
// for that one, and a process that took its place would have to do so again.
constexpr Duration kFirstBatchGrace = std::chrono::minutes(5);

struct AbandonedGrace {
  Duration first_batch = kFirstBatchGrace;
  Duration later = kAbandonedGrace;
};

// Whether a worker that is to leave since `drained_at` has had its time for what it has begun.
inline bool is_drain_over(std::optional<Instant> drained_at, Duration grace, Instant now) {
  return drained_at && now - *drained_at >= grace;
}

// A value type.
class MakerWatch {
 public:
  enum class State {
    kWaiting,    // for work
    kMaking,     // a batch that is wanted
    kAbandoned,  // neither
  };

  // To be called every now and then.
  void note(State state, Instant now) {
    // What the observer itself has slept through, as while the process was stopped, counts for little.
    const Duration passed = noted_at_ ? std::min(now - *noted_at_, kNoteInterval) : Duration(0);
    noted_at_ = now;
    abandoned_ = state == State::kAbandoned ? abandoned_ + passed : Duration(0);
  }
  // Batches of another trainer take another time.
  void begin_tenancy() { longest_.reset(); }
  void note_made(Duration time) { longest_ = std::max(longest(), time); }

  // For how long it has been at something that nobody wants.
  Duration abandoned() const { return abandoned_; }
  bool is_stuck() const { return abandoned_ >= std::max(kStuckAfter, longest()); }
  bool is_lost(const AbandonedGrace& grace) const {
    return abandoned_ >= (longest_ ? std::max(grace.later, 2 * *longest_) : grace.first_batch);
  }

 private:
  static constexpr Duration kNoteInterval = std::chrono::seconds(1);

  Duration longest() const { return longest_.value_or(Duration(0)); }

  std::optional<Instant> noted_at_;
  Duration abandoned_{};
  std::optional<Duration> longest_;  // of the batches of this tenancy; none before the first is made
};

}  // namespace penstock::server
