// SPDX-License-Identifier: Apache-2.0
#pragma once
// The data that a trainer's requests refer to or contain: blobs, which workers fetch (BlobStore), and the positions of
// an iterable dataset's shards (LanePlaces).

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "session/dispatch.h"
#include "wire/blob_record.h"

namespace penstock::pool_client {

// The blobs that a trainer's requests refer to, for workers to fetch: the parts of its job, and prefixes. Thread-safe.
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

// The progress of each shard of an iterable dataset, in answers: the position from which another worker can continue.
// Thread-compatible.
class LanePlaces {
 public:
  struct Place {
    uint64_t batch_count = 0;           // answered, including errors
    std::vector<std::byte> state = {};  // of the dataset after these batches; empty if it has none
  };

  // Forgets all places; lanes that are not in `places` start from the first batch.
  void begin(std::map<wire::Lane, Place> places) { places_ = std::move(places); }

  void answered(wire::Lane lane, std::span<const std::byte> state) {
    Place& place = places_[lane];
    ++place.batch_count;
    place.state.assign(state.begin(), state.end());
  }

  // The request's part for a lane start (PROTOCOL.md): the number of batches, and the state. Empty at the start of the
  // lane.
  std::vector<std::byte> start_of(wire::Lane lane) const {
    const auto found = places_.find(lane);
    if (found == places_.end()) return {};
    const Place& place = found->second;
    std::vector<std::byte> bytes(sizeof place.batch_count);
    std::memcpy(bytes.data(), &place.batch_count, sizeof place.batch_count);
    bytes.insert(bytes.end(), place.state.begin(), place.state.end());
    return bytes;
  }

 private:
  std::map<wire::Lane, Place> places_;
};

}  // namespace penstock::pool_client
