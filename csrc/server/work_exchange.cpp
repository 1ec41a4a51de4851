// SPDX-License-Identifier: Apache-2.0
#include "server/work_exchange.h"

#include <utility>

namespace penstock::server {

Result<std::shared_ptr<const PoolWork>> WorkExchange::next(Deadline deadline) {
  MutexLock lock(mutex_);
  wants_work_ = true;
  wake();
  while (!offered_ && !reason_) {
    if (changed_.wait_until(mutex_, deadline) || offered_ || reason_) continue;
    wants_work_ = false;
    return Fault{Errc::kTimeout, "no request was received before the deadline"};
  }
  wants_work_ = false;
  // Work that was started is finished, even if the server has ended meanwhile.
  if (!offered_) return *reason_;
  is_in_hand_ = true;
  return std::exchange(offered_, nullptr);
}

void WorkExchange::finish(PoolResult result) {
  MutexLock lock(mutex_);
  requested_blob_.reset();
  if (!std::exchange(is_in_hand_, false) || reason_) return;
  PENSTOCK_ASSERT(!result_, "two results of one request");
  result_ = std::move(result);
  wake();
}

Result<std::vector<std::byte>> WorkExchange::blob(const wire::BlobId& id, Deadline deadline) {
  MutexLock lock(mutex_);
  if (requested_blob_ != id) {
    requested_blob_ = id;
    blob_.reset();
    wake();
  }
  for (;;) {
    if (reason_) return *reason_;
    if (blob_) {
      requested_blob_.reset();
      return *std::exchange(blob_, std::nullopt);
    }
    if (!is_wanted_) {
      requested_blob_.reset();
      return Fault{Errc::kClosed, "this batch is no longer needed"};
    }
    if (!changed_.wait_until(mutex_, deadline) && !blob_ && !reason_ && is_wanted_)
      return Fault{Errc::kTimeout, "the trainer sent no message before the deadline"};
  }
}

bool WorkExchange::is_wanted() const {
  MutexLock lock(mutex_);
  return is_wanted_ && !reason_;
}

void WorkExchange::drain() {
  MutexLock lock(mutex_);
  is_to_drain_ = true;
  wake();
}

std::vector<std::string> WorkExchange::take_notices() {
  MutexLock lock(mutex_);
  return std::exchange(notices_, {});
}

Standing WorkExchange::standing() const {
  MutexLock lock(mutex_);
  return standing_;
}

WorkExchange::Needs WorkExchange::take_needs() {
  MutexLock lock(mutex_);
  return {.result = std::exchange(result_, std::nullopt),
          .wants_work = wants_work_ && !offered_,
          .is_to_drain = is_to_drain_,
          .blob = blob_ ? std::nullopt : requested_blob_};
}

void WorkExchange::offer(std::shared_ptr<const PoolWork> work) {
  MutexLock lock(mutex_);
  offered_ = std::move(work);
  is_wanted_ = true;
  changed_.notify_all();
}

void WorkExchange::set_wanted(bool is_wanted) {
  MutexLock lock(mutex_);
  if (std::exchange(is_wanted_, is_wanted) != is_wanted) changed_.notify_all();
}

void WorkExchange::give_blob(const wire::BlobId& id, Result<std::vector<std::byte>> bytes) {
  MutexLock lock(mutex_);
  if (requested_blob_ != id) return;
  blob_ = std::move(bytes);
  changed_.notify_all();
}

void WorkExchange::add_notice(std::string text) {
  MutexLock lock(mutex_);
  if (notices_.size() >= kNoticeCountMax) notices_.erase(notices_.begin());
  notices_.push_back(std::move(text));
}

void WorkExchange::set_standing(const Standing& standing) {
  MutexLock lock(mutex_);
  standing_ = standing;
}

void WorkExchange::close(Fault reason) {
  MutexLock lock(mutex_);
  if (!reason_) reason_ = std::move(reason);
  is_closed_.store(true);
  changed_.notify_all();
}

}  // namespace penstock::server
