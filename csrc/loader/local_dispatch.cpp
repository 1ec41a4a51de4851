// SPDX-License-Identifier: Apache-2.0
#include "loader/local_dispatch.h"

#include <limits>
#include <utility>

#include "base/assert.h"

namespace penstock::loader {

using cluster::Dispatch;
using wire::BatchKey;
using wire::RequestKind;

namespace {

// A worker that has answered is asked again within some tenths of a millisecond. Where that is nothing beside a batch,
// a request waits in the trainer for whoever is free first, and never behind a slow batch.
constexpr auto kAskedAheadBelow = std::chrono::milliseconds(5);
constexpr uint64_t kNoBound = std::numeric_limits<uint64_t>::max();

}  // namespace

LocalDispatch::LocalDispatch(uint32_t worker_count, uint32_t depth)
    : worker_count_(worker_count),
      dispatch_({.depth_max = depth, .asked_ahead_below = kAskedAheadBelow, .hedges = false, .blames_all = true}),
      knows_early_(worker_count, false) {}

std::vector<LocalDispatch::Send> LocalDispatch::take_sends() { return std::exchange(sends_, {}); }

std::vector<LocalDispatch::Failure> LocalDispatch::take_failures() { return std::exchange(failures_, {}); }

void LocalDispatch::announce(RequestKind kind, uint32_t epoch, Message message) {
  if (kind == RequestKind::kEarlyEpoch) {
    // Told with the first request of it, so that a worker does not turn to it while others of this epoch are to come.
    early_epoch_ = epoch;
    early_message_ = std::move(message);
    knows_early_.assign(worker_count_, false);
    return;
  }
  early_epoch_.reset();
  dispatch_.forget_other_epochs(epoch, Instant());
  carry_out();
  for (uint32_t worker_id = 0; worker_id < worker_count_; ++worker_id) sends_.push_back({worker_id, message});
}

void LocalDispatch::ask(BatchKey key, cluster::SharedContent content, Instant now) {
  dispatch_.ask(key, wire::kNoLane, now, std::move(content));
  carry_out();
}

void LocalDispatch::worker_came(uint32_t worker_id, Instant now) {
  dispatch_.add_worker(worker_id, kNoBound, now);
  carry_out();
}

void LocalDispatch::worker_died(uint32_t worker_id, Instant now) {
  ++lost_count_;
  dispatch_.lose_worker(worker_id, cluster::Loss::kDied, now);
  carry_out();
}

bool LocalDispatch::answered(uint32_t worker_id, BatchKey key, Instant now) {
  const bool counts = dispatch_.answered(worker_id, key, 1, now);
  carry_out();
  return counts;
}

void LocalDispatch::carry_out() {
  for (const Dispatch::Command& command : dispatch_.take_commands()) {
    switch (command.kind) {
      case Dispatch::Command::Kind::kAsk: {
        const auto content = dispatch_.content_of(command.key);
        if (!content) break;  // forgotten right after it was placed
        if (early_epoch_ == command.key.epoch && !knows_early_[command.worker]) {
          knows_early_[command.worker] = true;
          sends_.push_back({command.worker, early_message_});
        }
        sends_.push_back({command.worker, wire::write_message(content->request, content->indices)});
        break;
      }
      case Dispatch::Command::Kind::kFail: failures_.push_back({command.key, command.death_count}); break;
      case Dispatch::Command::Kind::kCancel:  // a local worker makes it all the same, and its answer is dropped
      case Dispatch::Command::Kind::kIdle: break;
    }
  }
}

}  // namespace penstock::loader
