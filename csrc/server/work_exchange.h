// SPDX-License-Identifier: Apache-2.0
#pragma once
// The meeting point of the two threads of a pool worker: the thread that makes batches, which belongs to Python, and
// the thread that communicates with trainers and the controller, which keeps running while the other is busy. Only one
// unit of work is between them at a time.

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"
#include "base/waker.h"
#include "server/maker.h"
#include "server/pool_work.h"
#include "server/work_source.h"
#include "wire/blob_record.h"

namespace penstock::server {

constexpr size_t kNoticeCountMax = 64;  // older ones are dropped

// Thread-safe.
class WorkExchange final : public Maker, public WorkSource {
 public:
  // Call before either thread uses this object: the waker of the I/O thread, which must outlive both.
  void set_waker(Waker& waker) { waker_ = &waker; }

  // ---- For the thread that makes batches

  Result<std::shared_ptr<const PoolWork>> next(Deadline deadline) override;
  void finish(PoolResult result) override;
  Result<std::vector<std::byte>> blob(const wire::BlobId& id, Deadline deadline) override;
  bool is_wanted() const override;
  void drain() override;
  std::vector<std::string> take_notices() override;
  Standing standing() const override;

  // ---- For the I/O thread

  void wake() const override {
    if (waker_ != nullptr) waker_->wake();
  }

  Asked take_asked() override;
  void offer(std::shared_ptr<const PoolWork> work) override;
  void set_wanted(bool is_wanted) override;
  void give_blob(const wire::BlobId& id, Result<std::vector<std::byte>> bytes) override;
  void add_notice(std::string text) override;
  void set_standing(const Standing& standing) override;
  void close(Fault reason) override;

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

}  // namespace penstock::server
