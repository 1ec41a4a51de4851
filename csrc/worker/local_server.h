// SPDX-License-Identifier: Apache-2.0
#pragma once
// A local worker's end of its channel to the trainer: takes requests, gives out memory for batches, names finished ones
// to the trainer. A watchdog thread sees the trainer die while the dataset is busy and ends the process, so that no
// worker is left behind.

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/file_descriptor.h"
#include "base/process_bound.h"
#include "base/result.h"
#include "shm/channel.h"
#include "wire/job_record.h"
#include "worker/batch_maker.h"
#include "worker/slab_writer.h"
#include "worker/watchdog.h"

namespace penstock::worker {

struct LocalServerOptions {
  uint32_t prefetch_factor = 2;
  uint64_t arena_bytes = 0;
  bool waits_for_slabs = true;  // as SlabPoolOptions::waits
  // The trainer's process; 0: the parent when this one begins. Without it, a trainer that died before that would go
  // unnoticed.
  pid_t trainer_pid = 0;
};

// Confined to the thread that serves requests, but for writer()'s thread-safe calls.
class LocalServer {
 public:
  // Takes over the worker's end of its channel, and tells the trainer that it can take requests. Requests that were
  // sent before wait in the channel. kClosed when the trainer is gone.
  static Result<std::unique_ptr<LocalServer>> open(const LocalServerOptions& options, FileDescriptor channel);

  LocalServer(const LocalServerOptions& options, shm::Channel channel);
  LocalServer(const LocalServer&) = delete;
  LocalServer& operator=(const LocalServer&) = delete;

  // Work, an epoch, or a question about states.
  struct Received {
    wire::ToJob::Kind kind = wire::ToJob::Kind::kWork;
    wire::BatchRequest request{};
    std::vector<std::byte> indices{};  // as request.index_kind says; of an epoch its seeds
    std::chrono::steady_clock::time_point arrived_at{};

    wire::BatchKey key() const { return {.epoch = request.epoch, .sequence = request.sequence}; }
  };
  // The next request, in the order they were sent. kTimeout at the deadline, kClosed when the trainer hung up. Blocks.
  // Prefixes are taken in here and not returned.
  Result<Received> next(std::chrono::steady_clock::time_point deadline);

  SlabWriter& writer() { return maker_.writer(); }

  // Runs the prefixes on a batch, seals it and names it to the trainer. `flags` are wire::kBatchFlags. Blocks while the
  // trainer does not read.
  Result<void> answer(const Received& request, BatchContent content, uint8_t flags);
  // Tells the trainer that a shard of an iterable dataset is exhausted, and the state of its dataset then, if it has
  // one.
  Result<void> answer_end(const Received& request, std::span<const std::byte> state = {});
  // Sends the trainer the states of this worker's shards.
  Result<void> answer_states(const Received& request, std::span<const std::byte> states);

 private:
  shm::Channel channel_;
  ProcessBound<Watchdog> watchdog_;
  BatchMaker maker_;
};

}  // namespace penstock::worker
