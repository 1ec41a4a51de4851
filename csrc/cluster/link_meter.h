// SPDX-License-Identifier: Apache-2.0
#pragma once
// How fast batches cross the network from the workers of a pool to their trainer, measured from the batches that cross.
// Pure: the caller has the clocks.
//
// A batch is on its way from when its worker could begin to send it until its last byte is there. The worker begins
// when the batch is made and the batch before it has crossed. The worker says by its own clock when it was made; the
// smallest difference seen between the arrival of a message and that clock translates its time into the trainer's.
//
// Workers that send at the same time either share a link (the trainer's own, most likely) or have one each. The rates
// tell: where two send, either the sum is what one alone reaches, or it is twice that.
//
// Tensors are written with fewer bytes for a slow link (wire/narrow.h). Batches of which little is left cross in the
// time that any message takes: were they counted, a fast link would look slow because of them, and go on doing so. They
// are left out, and once nothing else is remembered some batches have to cross as they are.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>

#include "base/instant.h"

namespace penstock::cluster {

// Batches that are remembered, and for how long.
constexpr size_t kCrossingCountMax = 256;
constexpr Duration kCrossingAgeMax = std::chrono::seconds(20);
// A clock's difference is forgotten after two of these: clocks drift.
constexpr Duration kClockWindow = std::chrono::seconds(10);
// Before so many batches have crossed, nothing is known.
constexpr size_t kCrossingCountMin = 2;
// What crosses sooner may have waited for threads alone. On loopback, with busy cores, 17 kB took 0.1 ms and 1 MB 1 ms.
constexpr Duration kTellingTimeMin = std::chrono::milliseconds(1);
// A narrow batch counts behind so many that took as long: one may have waited for a thread, and not for the link.
constexpr uint32_t kSlowNarrowCountMin = 8;

// Thread-compatible.
class LinkMeter {
 public:
  // A message of a worker, which had written it at `sent_at` of its own clock: from 0 to wire::kClockMax, whatever the
  // worker says.
  void note_message(uint64_t worker_id, Duration sent_at, Instant now);
  // The last byte of a batch of `bytes` has come, which was made at `sent_at` of the worker's clock.
  void note_batch(uint64_t worker_id, Duration sent_at, uint64_t bytes, Instant now, bool is_narrow = false);
  // When a message that a worker had written at `sent_at` of its own clock was written, by the caller's: nothing before
  // a message of that worker has come. It is early by up to half of a round trip that is known.
  std::optional<Instant> written_at(uint64_t worker_id, Duration sent_at) const;
  // A small message and its answer took so long.
  void note_round_trip(Duration time);
  // A worker is gone, or its connection was made anew.
  void forget(uint64_t worker_id) { clocks_.erase(worker_id); }

  // The bytes a second that reach the trainer when `worker_count` workers send. Nothing before kCrossingCountMin
  // batches. While no two workers were seen to send at the same time, they are taken to share a link.
  std::optional<double> bytes_per_s(size_t worker_count) const;
  // Whether the last that was remembered of the rate is too old, and batches that are written narrow tell no other.
  bool is_outdated() const { return is_outdated_; }
  // The shortest round trip seen lately.
  std::optional<Duration> round_trip() const { return round_trip_; }

 private:
  // The smallest difference between two clocks in the window that runs, and in the one before.
  struct Clock {
    Duration difference() const { return least_before ? std::min(*least, *least_before) : *least; }

    Instant window_began{};
    std::optional<Duration> least{};
    std::optional<Duration> least_before{};
    Instant last_came{};  // the last byte of the batch before
  };
  struct Crossing {
    Instant began{};
    Instant ended{};
    uint64_t bytes = 0;
  };

  std::map<uint64_t, Clock> clocks_;  // by worker
  std::deque<Crossing> crossings_;    // in the order of their ends
  uint32_t slow_narrow_count_ = 0;    // in a row
  bool is_outdated_ = false;
  std::optional<Duration> round_trip_;
};

}  // namespace penstock::cluster
