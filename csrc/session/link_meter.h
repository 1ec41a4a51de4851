// SPDX-License-Identifier: Apache-2.0
#pragma once
// The rate at which batches cross the network from a pool's workers to their trainer, measured from the batches that
// cross. Pure: the caller has the clocks.
//
// A batch is in transit from the moment when its worker could start to send it until its last byte arrives. The worker
// starts when the batch is made and the previous batch has crossed. The worker reports by its own clock when the batch
// was made; the smallest observed difference between the arrival of a message and that clock translates its time into
// the trainer's.
//
// Workers that send at the same time either share a link (the trainer's, most likely) or have separate ones. The rates
// distinguish the two cases: when two workers send, the combined rate is either the rate of a single one or twice that.
//
// Tensors are compressed for a slow link (wire/narrow.h). Batches that become very small cross in the time that any
// message takes: if they were counted, they would make a fast link look slow, and would continue to do so. They are
// left out, and once no other crossings are remembered, some batches have to cross uncompressed.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>

#include "base/clock.h"

namespace penstock::session {

// Number of batches that are remembered, and for how long.
constexpr size_t kCrossingCountMax = 256;
constexpr Duration kCrossingAgeMax = std::chrono::seconds(20);
// A clock difference is forgotten after two of these windows, because clocks drift.
constexpr Duration kClockWindow = std::chrono::seconds(10);
// Until this many batches have crossed, the rate is unknown.
constexpr size_t kCrossingCountMin = 2;
// Shorter crossings may be due to thread scheduling alone. On loopback, with busy cores, 17 kB took 0.1 ms and 1 MB 1
// ms.
constexpr Duration kMeasurableTimeMin = std::chrono::milliseconds(1);
// A compressed batch counts only after this many in a row that took at least kMeasurableTimeMin: a single one may have
// waited for a thread and not for the link.
constexpr uint32_t kSlowNarrowCountMin = 8;

// Thread-compatible.
class LinkMeter {
 public:
  // A message from a worker, written at `sent_at` by its own clock: from 0 to wire::kClockMax, whatever the worker
  // reports.
  void note_message(uint64_t worker_id, Duration sent_at, Instant now);
  // The last byte of a batch of `bytes` has arrived, which was made at `sent_at` by the worker's clock.
  void note_batch(uint64_t worker_id, Duration sent_at, uint64_t bytes, Instant now, bool is_narrow = false);
  // The time, by the caller's clock, at which a worker wrote a message with `sent_at` of its own clock; nullopt before
  // the first message of that worker. The result is early by up to half of a known round trip.
  std::optional<Instant> written_at(uint64_t worker_id, Duration sent_at) const;
  // A small message and its answer took this long.
  void note_round_trip(Duration time);
  // A worker is gone, or its connection was replaced.
  void forget(uint64_t worker_id) { clocks_.erase(worker_id); }

  // The bytes per second that reach the trainer when `worker_count` workers send; nullopt before kCrossingCountMin
  // batches. Until two workers have been observed to send at the same time, workers are assumed to share a link.
  std::optional<double> bytes_per_s(size_t worker_count) const;
  // Whether the last remembered rate is too old, and compressed batches do not reveal the current one.
  bool is_outdated() const { return is_outdated_; }
  // The shortest recent round trip.
  std::optional<Duration> round_trip() const { return round_trip_; }

 private:
  // The smallest difference between two clocks, in the current window and in the one before.
  struct Clock {
    Duration difference() const { return least_before ? std::min(*least, *least_before) : *least; }

    Instant window_began{};
    std::optional<Duration> least{};
    std::optional<Duration> least_before{};
    Instant last_arrival{};  // arrival of the previous batch's last byte
  };
  struct Crossing {
    Instant began{};
    Instant ended{};
    uint64_t bytes = 0;
  };

  std::map<uint64_t, Clock> clocks_;  // by worker
  std::deque<Crossing> crossings_;    // in order of their ends
  uint32_t slow_narrow_count_ = 0;    // consecutive
  bool is_outdated_ = false;
  std::optional<Duration> round_trip_;
};

}  // namespace penstock::session
