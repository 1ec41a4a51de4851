// SPDX-License-Identifier: Apache-2.0
#include "loader/local_dispatch.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/assert.h"

namespace penstock::loader {

using session::Dispatch;
using wire::BatchKey;
using wire::ToJob;

namespace {

// A worker that has answered receives its next request within some tenths of a millisecond. If a batch takes far longer
// than that, requests wait in the trainer for the first free worker, never behind a slow batch.
constexpr auto kAskedAheadBelow = std::chrono::milliseconds(5);
constexpr uint64_t kNoBound = std::numeric_limits<uint64_t>::max();

}  // namespace

ToJob work_of(const session::RequestContent& content) {
  const wire::BatchRequest& request = content.request;
  return {.kind = ToJob::Kind::kWork,
          .index_kind = request.index_kind,
          .key = {.epoch = request.epoch, .sequence = request.sequence},
          .lane = request.shard_id + 1,
          .epoch_seed = request.epoch_seed,
          .first_place = request.first_place,
          .indices = content.indices};
}

LocalDispatch::LocalDispatch(uint32_t worker_count, uint32_t depth)
    : dispatch_({.depth_max = depth, .asked_ahead_below = kAskedAheadBelow, .hedges = false, .blames_all = true}),
      workers_(worker_count) {}

std::vector<LocalDispatch::Send> LocalDispatch::take_sends() { return std::exchange(sends_, {}); }

std::vector<LocalDispatch::Failure> LocalDispatch::take_failures() { return std::exchange(failures_, {}); }

void LocalDispatch::announce(ToJob::Kind kind, uint32_t epoch, Message message, Instant now) {
  if (kind == ToJob::Kind::kEarlyEpoch) {
    // Announced with the early epoch's first request, so that a worker does not switch to it before its other requests
    // of this epoch arrive.
    early_epoch_ = epoch;
    early_message_ = std::move(message);
    for (Worker& worker : workers_) worker.knows_early = false;
    return;
  }
  early_epoch_.reset();
  dispatch_.forget_other_epochs(epoch, now);
  // A worker skips requests of finished epochs, so a late worker may never answer.
  for (uint32_t worker_id = 0; worker_id < workers_.size(); ++worker_id) end_lateness(worker_id, now);
  for (uint32_t worker_id = 0; worker_id < workers_.size(); ++worker_id) sends_.push_back({worker_id, message});
  carry_out(now);
}

void LocalDispatch::ask(BatchKey key, session::SharedContent content, Instant now) {
  dispatch_.ask(key, wire::kNoLane, now, std::move(content));
  carry_out(now);
}

void LocalDispatch::worker_came(uint32_t worker_id, Instant now) {
  dispatch_.add_worker(worker_id, kNoBound, now);
  carry_out(now);
}

void LocalDispatch::worker_died(uint32_t worker_id, Instant now) {
  ++lost_count_;
  workers_[worker_id].is_dead = true;
  dispatch_.lose_worker(worker_id, session::Loss::kDied, now);
  carry_out(now);
}

bool LocalDispatch::answered(uint32_t worker_id, BatchKey key, bool dataset_stays, Instant now) {
  Worker& worker = workers_[worker_id];
  if (worker.dataset_stays != dataset_stays) {
    worker.dataset_stays = dataset_stays;
    dispatch_.set_hedges(std::ranges::all_of(
        workers_, [](const Worker& one) { return one.is_dead || one.dataset_stays.value_or(true); }));
  }
  end_lateness(worker_id, now);
  const bool counts = dispatch_.answered(worker_id, key, 1, now);
  carry_out(now);
  return counts;
}

void LocalDispatch::tick(Instant now) {
  dispatch_.tick(now);
  carry_out(now);
}

void LocalDispatch::carry_out(Instant now) {
  for (auto commands = dispatch_.take_commands(); !commands.empty(); commands = dispatch_.take_commands()) {
    for (const Dispatch::Command& command : commands) {
      switch (command.kind) {
        case Dispatch::Command::Kind::kAsk: send_request(command.worker, command.key); break;
        case Dispatch::Command::Kind::kFail: failures_.push_back({command.key, command.death_count}); break;
        case Dispatch::Command::Kind::kCancel:  // a local worker makes it anyway, and its answer is dropped
          if (!command.has_come) break;
          workers_[command.worker].is_late = true;
          dispatch_.lose_worker(command.worker, session::Loss::kSilent, now);
          break;
        case Dispatch::Command::Kind::kIdle: break;
      }
    }
  }
}

void LocalDispatch::end_lateness(uint32_t worker_id, Instant now) {
  Worker& worker = workers_[worker_id];
  if (std::exchange(worker.is_late, false) && !worker.is_dead) dispatch_.add_worker(worker_id, kNoBound, now);
}

void LocalDispatch::send_request(uint32_t worker_id, BatchKey key) {
  const auto content = dispatch_.content_of(key);
  if (!content) return;  // forgotten right after its assignment
  Worker& worker = workers_[worker_id];
  if (early_epoch_ == key.epoch && !worker.knows_early) {
    worker.knows_early = true;
    sends_.push_back({worker_id, early_message_});
  }
  sends_.push_back({worker_id, wire::write_to_job(work_of(*content))});
}

}  // namespace penstock::loader
