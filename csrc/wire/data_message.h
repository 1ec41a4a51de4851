// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages between a trainer and a pool worker about batches, without the bytes of requests and batches, which
// follow the message (wire/PROTOCOL.md).

#include <cstdint>

#include "wire/batch_key.h"

namespace penstock::wire {

// A shard of an iterable dataset, counted from 1; kNoLane for a batch that depends only on its indices.
using Lane = uint32_t;
constexpr Lane kNoLane = 0;

struct ToWorker {
  enum class Kind : uint8_t {
    kHello = 1,  // starts a link; if it continues one, `count` requests that were outstanding on it follow immediately
    kRequest,
    kCancel,
    kAck,  // the trainer has the batch in its memory, or does not want it
    kPing,
    kBye,  // the trainer has ended or, if `is_continued`, no longer needs this worker but may return
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
    kWelcome = 1,  // the link has started
    kRefused,      // the worker serves another trainer, or is leaving
    kBroken,       // a message on the link was lost, or the link is unknown to the worker: start another
    kStarted,
    kAnswer,
    kHandedBack,  // the worker is leaving and will not make this batch
    kPong,
    kLeaving,   // the worker accepts no more requests
    kDeclined,  // the worker cannot make this trainer's batches
    kDied,      // the worker continues, but the process that was making this batch has ended: start another link
  };
  Kind kind = Kind::kPong;
  uint32_t link = 0;
  uint64_t stamp = 0;  // 0 for refused, broken and declined, which belong to no link
  BatchKey key{};
  bool is_fresh = false;  // of welcome: the worker has no state of the previous link

  friend bool operator==(const ToTrainer&, const ToTrainer&) = default;
};

}  // namespace penstock::wire
