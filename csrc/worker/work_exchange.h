// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the two threads of a pool's worker meet: the one that makes batches, which is Python's, and the one that talks
// to trainers and the controller, which goes on while the other is busy. One piece of work is between them at a time.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "base/waker.h"
#include "wire/blob_record.h"
#include "worker/pool_work.h"

namespace penstock::worker {

constexpr size_t kNoticeCountMax = 64;  // older ones are dropped

// For whom a worker works, and why it leaves: its log says so when it changes.
struct Standing {
  enum class DrainCause : uint8_t { kNone, kSigterm, kSigint, kOrder, kShortage };
  uint64_t trainer_id = 0;  // that it works for; 0 for none
  DrainCause drain_cause = DrainCause::kNone;
  uint32_t left_count = 0;  // batches that it had begun and its trainer had not, when it began to drain

  friend bool operator==(const Standing&, const Standing&) = default;
};

// For people; empty for none.
constexpr std::string_view name_of(Standing::DrainCause cause) {
  switch (cause) {
    case Standing::DrainCause::kNone: break;
    case Standing::DrainCause::kSigterm: return "SIGTERM";
    case Standing::DrainCause::kSigint: return "SIGINT";
    case Standing::DrainCause::kOrder: return "penstock drain";
    case Standing::DrainCause::kShortage: return "a shortage";
  }
  return {};
}

// Thread-safe.
class WorkExchange {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Before either thread uses it: the waker of the I/O thread, which outlives both.
  void set_waker(Waker& waker) { waker_ = &waker; }

  // ---- For the thread that makes batches

  // The next piece of work. kTimeout at the deadline; why the server ended once it has. Blocks.
  Result<std::shared_ptr<const PoolWork>> next(Deadline deadline);
  // Hands over the result of the work in hand. A second one is dropped: a dataset's signal handler may raise just
  // behind the first.
  void finish(PoolResult result);
  // A blob that the work in hand is made with. kTimeout at the deadline, after which the same is asked for again;
  // kClosed when the work is not wanted any more. Blocks.
  Result<std::vector<std::byte>> blob(const wire::BlobId& id, Deadline deadline);
  bool is_wanted() const;
  void drain();
  // News for people, in the order in which it happened.
  std::vector<std::string> take_notices();
  Standing standing() const;

  // ---- For the I/O thread

  // Has it take a turn. For any thread.
  void wake() const {
    if (waker_ != nullptr) waker_->wake();
  }

  struct Asked {
    std::optional<PoolResult> result;
    bool wants_work = false;
    bool is_to_drain = false;
    std::optional<wire::BlobId> blob;
  };
  // The result is handed out once; the rest is asked for until it is given.
  Asked take_asked();
  void offer(std::shared_ptr<const PoolWork> work);
  void set_wanted(bool is_wanted);
  void give_blob(const wire::BlobId& id, Result<std::vector<std::byte>> bytes);
  void add_notice(std::string text);
  void set_standing(const Standing& standing);
  // Nothing is offered from now on; the first reason stands.
  void close(Fault reason);

  const std::atomic<bool>& is_closed() const { return is_closed_; }

 private:
  Waker* waker_ = nullptr;
  std::atomic<bool> is_closed_{false};
  mutable Mutex mutex_;
  Condition changed_;
  std::optional<Fault> reason_ PENSTOCK_GUARDED_BY(mutex_);
  std::shared_ptr<const PoolWork> offered_ PENSTOCK_GUARDED_BY(mutex_);  // shared by both threads
  bool wants_work_ PENSTOCK_GUARDED_BY(mutex_) = false;
  bool is_wanted_ PENSTOCK_GUARDED_BY(mutex_) = false;
  bool is_to_drain_ PENSTOCK_GUARDED_BY(mutex_) = false;
  bool is_in_hand_ PENSTOCK_GUARDED_BY(mutex_) = false;  // work that was given out
  std::optional<PoolResult> result_ PENSTOCK_GUARDED_BY(mutex_);
  std::optional<wire::BlobId> wished_blob_ PENSTOCK_GUARDED_BY(mutex_);
  std::optional<Result<std::vector<std::byte>>> blob_ PENSTOCK_GUARDED_BY(mutex_);
  std::vector<std::string> notices_ PENSTOCK_GUARDED_BY(mutex_);
  Standing standing_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace penstock::worker
