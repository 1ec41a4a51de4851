// SPDX-License-Identifier: Apache-2.0
#pragma once
// The blobs that a trainer's requests name, for workers to ask for.

#include <algorithm>
#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "wire/blob_record.h"

namespace penstock::loader {

// Thread-safe.
class BlobShelf {
 public:
  void put(const wire::BlobId& id, std::string bytes) {
    auto shared = std::make_shared<const std::string>(std::move(bytes));
    MutexLock lock(mutex_);
    blobs_.insert_or_assign(id, std::move(shared));
  }

  // Shared with ZeroMQ while a piece of it is on its way. Null if it is not here.
  std::shared_ptr<const std::string> find(const wire::BlobId& id) const {
    MutexLock lock(mutex_);
    const auto found = blobs_.find(id);
    return found == blobs_.end() ? nullptr : found->second;
  }

 private:
  mutable Mutex mutex_;
  std::map<wire::BlobId, std::shared_ptr<const std::string>> blobs_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace penstock::loader
