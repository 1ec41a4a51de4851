// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the trainer tells its threads while they run: the prefixes of offloaded modules, and where shards of a resumed
// epoch begin.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "dataset/batch_reader.h"
#include "wire/epoch_seeds.h"

namespace penstock::api {

// Thread-safe.
class SharedPrefixes {
 public:
  using Message = std::shared_ptr<const std::vector<std::byte>>;  // shared by the threads that read it

  // Batches that are begun from now on are made with these.
  void set(std::vector<Message> messages) {
    MutexLock lock(mutex_);
    messages_ = std::move(messages);
    ++version_;
  }

  struct Known {
    std::vector<Message> messages;
    uint64_t version = 0;
  };
  // Those in force, if their version is another than `version`.
  bool try_get(uint64_t version, Known& known) const {
    MutexLock lock(mutex_);
    if (version_ == version) return false;
    known = {.messages = messages_, .version = version_};
    return true;
  }

 private:
  mutable Mutex mutex_;
  std::vector<Message> messages_ PENSTOCK_GUARDED_BY(mutex_);
  uint64_t version_ PENSTOCK_GUARDED_BY(mutex_) = 0;
};

// Thread-safe.
class SharedStarts {
 public:
  using ShardStart = dataset::BatchReader::ShardStart;

  // The shards of the epoch with these seeds begin there; all others at their beginning.
  void set(const wire::EpochSeeds& seeds, std::map<uint32_t, ShardStart> starts) {
    MutexLock lock(mutex_);
    seeds_ = seeds;
    starts_ = std::move(starts);
  }
  ShardStart start_of(const wire::EpochSeeds& seeds, uint32_t shard_id) const {
    MutexLock lock(mutex_);
    const auto found = starts_.find(shard_id);
    return seeds == seeds_ && found != starts_.end() ? found->second : ShardStart{};
  }

 private:
  mutable Mutex mutex_;
  wire::EpochSeeds seeds_ PENSTOCK_GUARDED_BY(mutex_);
  std::map<uint32_t, ShardStart> starts_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace penstock::api
