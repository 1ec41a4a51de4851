// SPDX-License-Identifier: Apache-2.0
#pragma once
// A local worker's end of its channel to the trainer: takes requests, allocates memory for batches, and names finished
// batches to the trainer. A watchdog thread detects the trainer's death while the dataset is busy and ends the process,
// so that no worker is left behind.

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
  // The trainer's process; 0: the parent when this object is created. Without it, the death of a trainer before that
  // would go unnoticed.
  pid_t trainer_pid = 0;
};

// Confined to the thread that serves requests, except for writer()'s thread-safe calls.
class LocalServer {
 public:
  // Takes ownership of the worker's end of its channel, and notifies the trainer that it accepts requests. Requests
  // sent earlier wait in the channel. kClosed when the trainer is gone.
  static Result<std::unique_ptr<LocalServer>> open(const LocalServerOptions& options, FileDescriptor channel);

  LocalServer(const LocalServerOptions& options, shm::Channel channel);
  LocalServer(const LocalServer&) = delete;
  LocalServer& operator=(const LocalServer&) = delete;

  // Work, an epoch, or a question about states.
  struct Received {
    wire::ToJob::Kind kind = wire::ToJob::Kind::kWork;
    wire::BatchRequest request{};
    std::vector<std::byte> indices{};  // format: request.index_kind; the seeds of an epoch
    std::chrono::steady_clock::time_point arrived_at{};

    wire::BatchKey key() const { return {.epoch = request.epoch, .sequence = request.sequence}; }
  };
  // The next request, in the order they were sent. kTimeout at the deadline, kClosed when the trainer hung up. Blocks.
  // Prefixes are handled here and not returned.
  Result<Received> next(std::chrono::steady_clock::time_point deadline);

  SlabWriter& writer() { return maker_.writer(); }

  // Runs the prefixes on a batch, seals it and names it to the trainer. `flags` are wire::kBatchFlags. Blocks while the
  // trainer does not read.
  Result<void> answer(const Received& request, BatchContent content, uint8_t flags);
  // Reports to the trainer that a shard of an iterable dataset is exhausted, with the state of its dataset at that
  // point, if it has one.
  Result<void> answer_end(const Received& request, std::span<const std::byte> state = {});
  // Sends the trainer the states of this worker's shards.
  Result<void> answer_states(const Received& request, std::span<const std::byte> states);

 private:
  shm::Channel channel_;
  ProcessBound<Watchdog> watchdog_;
  BatchMaker maker_;
};

}  // namespace penstock::worker
