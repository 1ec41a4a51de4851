// SPDX-License-Identifier: Apache-2.0
#pragma once
// The blobs that a trainer's requests refer to, for workers to fetch: the parts of its job, and prefixes.

#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "wire/blob_record.h"

namespace penstock::pool_client {

// Thread-safe.
class BlobStore {
 public:
  using Ids = std::shared_ptr<const std::vector<wire::BlobId>>;

  void put(const wire::BlobId& id, std::string bytes) {
    auto shared = std::make_shared<const std::string>(std::move(bytes));
    MutexLock lock(mutex_);
    blobs_.insert_or_assign(id, std::move(shared));
  }

  // Sets the ids that requests name from now on. A previously named blob is dropped once no request names it any more,
  // and must be put again before it is named again. Blobs that were never named by a request, such as the blobs of a
  // job, stay.
  Ids name(std::vector<wire::BlobId> ids) {
    auto named = std::make_shared<const std::vector<wire::BlobId>>(std::move(ids));
    MutexLock lock(mutex_);
    named_.emplace_back(named);
    ever_named_.insert(named->begin(), named->end());
    std::set<wire::BlobId> alive;
    std::erase_if(named_, [](const auto& weak) { return weak.expired(); });
    for (const auto& weak : named_) {
      if (const auto some = weak.lock()) alive.insert(some->begin(), some->end());
    }
    for (auto at = ever_named_.begin(); at != ever_named_.end();) {
      const bool is_dropped = !alive.contains(*at) && blobs_.erase(*at) > 0;
      at = is_dropped ? ever_named_.erase(at) : std::next(at);
    }
    return named;
  }

  // Shared with ZeroMQ while a chunk of it is being sent. Null if it is not stored here.
  std::shared_ptr<const std::string> find(const wire::BlobId& id) const {
    MutexLock lock(mutex_);
    const auto found = blobs_.find(id);
    return found == blobs_.end() ? nullptr : found->second;
  }

  size_t size() const {
    MutexLock lock(mutex_);
    return blobs_.size();
  }

 private:
  mutable Mutex mutex_;
  std::map<wire::BlobId, std::shared_ptr<const std::string>> blobs_ PENSTOCK_GUARDED_BY(mutex_);
  std::set<wire::BlobId> ever_named_ PENSTOCK_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<const std::vector<wire::BlobId>>> named_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace penstock::pool_client
