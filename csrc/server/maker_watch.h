// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whether the thread of a worker that makes batches is useful: it waits for work, or makes a batch that is wanted, for
// any length of time. A batch that is no longer wanted may never end: its sample may wait for a disk that is gone, or
// hold the interpreter's lock in a loop. Pure. Also used by the simulated workers of tests/sim.

#include <algorithm>
#include <optional>

#include "base/instant.h"

namespace penstock::server {

// How long a worker may be busy with an unwanted batch before it counts as stuck, and before its process is ended. Both
// are longer if the trainer's batches take longer.
constexpr Duration kStuckAfter = std::chrono::seconds(2);
constexpr Duration kAbandonedGrace = std::chrono::seconds(10);
// The time before its process is ended during the first batch for a trainer: this batch may import modules and open an
// index, and a replacement process would have to do so again.
constexpr Duration kFirstBatchGrace = std::chrono::minutes(5);

struct AbandonedGrace {
  Duration first_batch = kFirstBatchGrace;
  Duration later = kAbandonedGrace;
};

// Whether a worker that has been draining since `drained_at` has used up its time for the work that it had started.
inline bool is_drain_over(std::optional<Instant> drained_at, Duration grace, Instant now) {
  return drained_at && now - *drained_at >= grace;
}

// A value type.
class MakerWatch {
 public:
  enum class State {
    kWaiting,    // for work
    kMaking,     // a batch that is wanted
    kAbandoned,  // neither of these
  };

  // Call at regular intervals.
  void note(State state, Instant now) {
    // Time during which the observer itself did not run, for example because the process was stopped, counts only up to
    // kNoteInterval.
    const Duration passed = noted_at_ ? std::min(now - *noted_at_, kNoteInterval) : Duration(0);
    noted_at_ = now;
    abandoned_ = state == State::kAbandoned ? abandoned_ + passed : Duration(0);
  }
  // Batches of another trainer take a different time.
  void begin_tenancy() { longest_.reset(); }
  void note_made(Duration time) { longest_ = std::max(longest(), time); }

  // How long it has been busy with unwanted work.
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
  std::optional<Duration> longest_;  // among the batches of this tenancy; empty before the first is made
};

}  // namespace penstock::server
