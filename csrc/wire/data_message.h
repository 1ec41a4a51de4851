// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages between a trainer and a worker of a pool about batches, without the bytes of requests and batches
// themselves: these travel behind it (wire/PROTOCOL.md).

#include <cstdint>

#include "wire/batch_key.h"

namespace penstock::wire {

// A shard of an iterable dataset, counted from 1; kNoLane for a batch that follows from nothing but its indices.
using Lane = uint32_t;
constexpr Lane kNoLane = 0;

struct ToWorker {
  enum class Kind : uint8_t {
    kHello = 1,  // begins a link; if that continues one, `count` requests that were outstanding on it follow at once
    kRequest,
    kCancel,
    kAck,  // the batch lies in the trainer's memory, or is not wanted there
    kPing,
    kBye,  // the trainer has ended, or, where `is_continued`, does without this worker and may come back
  };
  Kind kind = Kind::kPing;
  uint64_t trainer_id = 0;  // of this run of the trainer
  uint32_t link = 0;
  uint64_t stamp = 0;
  BatchKey key{};
  Lane lane = kNoLane;
  bool is_lane_start = false;
  bool is_continued = false;
  uint32_t count = 0;

  friend bool operator==(const ToWorker&, const ToWorker&) = default;
};

struct ToTrainer {
  enum class Kind : uint8_t {
    kWelcome = 1,  // the link is begun
    kRefused,      // the worker serves another trainer, or leaves
    kBroken,       // something on the link was lost, or the worker knows nothing of it: begin another
    kStarted,
    kAnswer,
    kHandedBack,  // the worker leaves and will not make this
    kPong,
    kLeaving,   // the worker takes no more requests
    kDeclined,  // the worker cannot make the batches of this trainer
    kDied,      // the worker goes on, and the process has ended in which it made this batch: begin another link
  };
  Kind kind = Kind::kPong;
  uint32_t link = 0;
  uint64_t stamp = 0;  // 0 of refused, broken and declined, which are of no link
  BatchKey key{};
  bool is_fresh = false;  // of welcome: the worker has no state of the link before

  friend bool operator==(const ToTrainer&, const ToTrainer&) = default;
};

}  // namespace penstock::wire
