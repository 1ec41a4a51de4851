// SPDX-License-Identifier: Apache-2.0
#pragma once
// Data that the trainer passes to its running threads: the prefixes of offloaded modules, and the positions at which
// the shards of a resumed epoch start.

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

  // Batches started from now on are made with these prefixes.
  void set(std::vector<Message> messages) {
    MutexLock lock(mutex_);
    messages_ = std::move(messages);
    ++version_;
  }

  struct Known {
    std::vector<Message> messages;
    uint64_t version = 0;
  };
  // Gets the current prefixes if their version is not `version`.
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

  // In the epoch with these seeds, these shards start at the given positions; all others start at position 0.
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
