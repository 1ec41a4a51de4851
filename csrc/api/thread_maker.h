// SPDX-License-Identifier: Apache-2.0
#pragma once
// A ThreadMaker makes batches in a thread: it reads the dataset's samples, then runs the transform and the prefixes of
// offloaded modules. SharedPrefixes and SharedStarts hold the data that the trainer passes to its running threads.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "api/module_call.h"
#include "base/mutex.h"
#include "dataset/batch_reader.h"
#include "loader/thread_source.h"
#include "wire/epoch_seeds.h"
#include "worker/prefix_stage.h"

namespace penstock::api {

// The prefixes of offloaded modules. Thread-safe.
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

// The positions at which the shards of a resumed epoch start. Thread-safe.
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

// Makes the batches of one thread, to which it is confined.
class ThreadMaker final : public loader::ThreadMaker {
 public:
  // Shared with the other threads and with the trainer.
  struct Shared {
    std::shared_ptr<loader::RecycledMemory> memory;
    std::shared_ptr<SharedPrefixes> prefixes;
    std::shared_ptr<SharedStarts> starts;
  };

  ThreadMaker(std::unique_ptr<dataset::BatchReader> reader, std::optional<BatchTransform> transform, Shared shared);

  std::string in_hand() const override { return reader_->in_hand(); }
  Made make(const session::RequestContent& content, const wire::EpochSeeds& seeds) override;

 private:
  std::optional<Value> read(const session::RequestContent& content, const wire::EpochSeeds& seeds);
  void run_prefixes(const wire::BatchRequest& request, Made& made);

  std::unique_ptr<dataset::BatchReader> reader_;
  std::optional<BatchTransform> transform_;
  Shared shared_;
  worker::PrefixStage prefixes_;
  uint64_t prefix_version_ = 0;
  bool has_prefixes_ = false;
};

}  // namespace penstock::api
