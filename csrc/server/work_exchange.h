// SPDX-License-Identifier: Apache-2.0
#pragma once
// The meeting point of the two threads of a pool worker (WorkExchange): the thread that makes batches, which belongs to
// Python, and the thread that communicates with trainers and the controller, which keeps running while the other is
// busy. The former uses it as its WorkSource, the latter as its Maker (maker.h).

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/result.h"
#include "server/maker.h"
#include "wire/blob_record.h"

namespace penstock::server {

// Where the thread that makes a pool worker's batches gets its work, and delivers the results: the other side of Maker.
// For that thread, except for drain(), which is for any thread.
class WorkSource {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  WorkSource() = default;
  WorkSource(const WorkSource&) = delete;
  WorkSource& operator=(const WorkSource&) = delete;
  virtual ~WorkSource() = default;

  // The next unit of work. kTimeout at the deadline; the reason why the server ended, once it has. Blocks.
  virtual Result<std::shared_ptr<const PoolWork>> next(Deadline deadline) = 0;
  // Delivers the result of the current work. A second result is dropped: a signal handler of the dataset may raise just
  // after the first.
  virtual void finish(PoolResult result) = 0;
  // A blob needed for the current work. kTimeout at the deadline, after which the caller requests the same blob again;
  // kClosed when the work is no longer wanted. Blocks.
  virtual Result<std::vector<std::byte>> blob(const wire::BlobId& id, Deadline deadline) = 0;
  virtual bool is_wanted() const = 0;
  // No more work is wanted; next() ends once all started work has been taken.
  virtual void drain() = 0;
  // Human-readable notices, in chronological order.
  virtual std::vector<std::string> take_notices() = 0;
  virtual Standing standing() const = 0;
};

constexpr size_t kNoticeCountMax = 64;  // older ones are dropped

// Only one unit of work is between the two threads at a time. Thread-safe.
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

  Needs take_needs() override;
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
  std::optional<wire::BlobId> requested_blob_ PENSTOCK_GUARDED_BY(mutex_);
  std::optional<Result<std::vector<std::byte>>> blob_ PENSTOCK_GUARDED_BY(mutex_);
  std::vector<std::string> notices_ PENSTOCK_GUARDED_BY(mutex_);
  Standing standing_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace penstock::server
