// SPDX-License-Identifier: Apache-2.0
#pragma once
// A local worker's end of its channel to the trainer (LocalServer), and the watchdog that ends the process once the
// trainer is dead (Watchdog). send_message() and send_batch() send the results, for job processes, too.

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <vector>

#include "base/event_loop.h"
#include "base/file_descriptor.h"
#include "base/process.h"
#include "base/result.h"
#include "server/watched_process.h"
#include "shm/channel.h"
#include "shm/slab_pool.h"
#include "wire/job_record.h"
#include "worker/batch_maker.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

// Ends a local worker whose trainer is dead, so that no worker is left behind: the thread that serves requests may stay
// in the dataset for a long time and not return to notice it. Thread-safe.
class Watchdog final : private EventLoop::Handler {
 public:
  // Watches the connection to the trainer and the trainer's process. When the process is gone or this object fails, it
  // shuts down the connection, so that threads waiting for the trainer continue: another process may hold the trainer's
  // end. `trainer_pid` is as for server::WatchedProcess.
  Watchdog(int connection_fd, pid_t trainer_pid);
  ~Watchdog() override { loop_.stop(); }

  Result<void> start() { return loop_.start(); }

  // True once the trainer hung up or died. Also for threads that wait for memory meanwhile.
  const std::atomic<bool>& is_closing() const { return is_closing_; }
  std::atomic<bool>& is_closing() { return is_closing_; }
  // kClosed once the trainer is gone, or the error with which this object failed.
  Result<void> health() const;

 private:
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void failed(Fault) override { hang_up(); }
  void hang_up();

  const int connection_fd_;
  const server::WatchedProcess trainer_;
  std::atomic<bool> is_closing_{false};
  bool has_hung_up_ = false;
  server::OrphanGrace grace_;
  EventLoop loop_;
};

// The location of a batch: in `region`, or in `payload` followed by `record`.
struct ResultBatch {
  const shm::SlabRegion* region = nullptr;
  std::span<const std::byte> payload = {};
  std::span<const std::byte> record = {};  // empty if `payload` ends with it
  std::span<const int> files = {};         // of its tensors in shared memory
};

// Sends a message without a batch from a process that makes batches to its parent in the chain (trainer or server).
// kClosed when the receiver is gone. Blocks until the socket has accepted it.
Result<void> send_message(shm::Channel& channel, const wire::FromJob& message);

// Sends a batch: by the name of its slab, with the descriptor of an arena that is new to the receiver, or after its
// message if it is not in a slab. Fills in its location; the caller sets the sizes of record and payload. `slabs`
// contains the region. As send_message().
Result<void> send_batch(shm::Channel& channel, shm::SlabPool& slabs, wire::FromJob message, const ResultBatch& batch);

struct LocalServerOptions {
  uint32_t prefetch_factor = 2;
  uint64_t arena_bytes = 0;
  bool waits_for_slabs = true;  // as SlabPoolOptions::waits
  // The trainer's process; 0: the parent when this object is created. Without it, the death of a trainer before that
  // would go unnoticed.
  pid_t trainer_pid = 0;
};

// A local worker's end of its channel to the trainer: takes requests, allocates memory for batches, and names finished
// batches to the trainer.
//
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

  // The requests for batches that have arrived behind the current one, in their order, each once; next() returns them,
  // too. Does not block.
  std::vector<Received> upcoming();

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
  std::deque<std::vector<std::byte>> waiting_;  // messages that upcoming() has read
};

}  // namespace penstock::worker
