// SPDX-License-Identifier: Apache-2.0
#pragma once
// The trainer's end of its workers, local ones or a pool's: it sends requests and delivers batches in torch's order.
// The source's I/O thread owns every socket: it greets workers, sends requests, and turns their answers into batches. A
// stream (stream.h) decides when to request which batch; every trainer uses one.
//
// The thread starts in start(), after the workers were forked. In a forked child a client is inert: its destructor has
// no effect, because the thread that the client owns exists only in the parent.

#include <c10/core/Device.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/process.h"
#include "base/result.h"
#include "loader/batch.h"
#include "loader/batch_source.h"
#include "loader/copy_stage.h"
#include "loader/counters.h"
#include "loader/index_source.h"
#include "loader/step_ledger.h"
#include "session/request_order.h"
#include "wire/job_record.h"
#include "wire/message.h"

namespace penstock::loader {

// Limit on the bytes of batches on a device that wait for delivery. They hide the time of a copy, for which a second
// batch suffices; the batches on the host compensate for slow samples.
inline constexpr uint64_t kStagedBytes = 256 << 20;

struct ClientOptions {
  uint32_t worker_count = 1;
  uint32_t prefetch_factor = 2;
  uint32_t slab_count = 0;   // slabs that a local worker has for its answers; 0: prefetch_factor
  uint32_t shard_count = 0;  // of an iterable dataset; worker s % worker_count serves shard s. 0: one per worker
  // Limit on the bytes of batches requested and not delivered, see has_room(), and of batches copied to a device ahead.
  // 0: no limit, and kStagedBytes.
  uint64_t prefetch_bytes = 0;
  uint32_t overtaking_max = 0;  // batches that may be delivered before the oldest one, or session::kAnyOrder
  // Any worker may make any batch: the worker expected to answer soonest is asked, and the others take over a dead
  // worker's outstanding batches. Without this, a shard's worker makes all of its batches, and its death ends the
  // stream.
  bool any_worker = false;
  bool keep_workers = false;            // persistent workers stay after their share of an iterable dataset has ended
  bool keep_indices = true;             // of unanswered requests, for awaited()
  bool pin_memory = false;              // deliver every batch in pinned memory (batch_stage.h)
  std::optional<c10::Device> device{};  // that batches are copied to ahead of use
  // Tensors to copy ahead in addition to those on the host; null to copy none. Excludes `device`.
  std::shared_ptr<AheadWishes> ahead = {};
  std::shared_ptr<ArrivalTap> tap = {};  // as Stages::tap
  bool leaves_by_rank = false;  // batches have no values of the leaves that other ranks of a replica group read
};

// The start of an epoch: later than its first batch when the epoch is resumed.
struct EpochStart {
  uint64_t sequence = 0;
  std::vector<uint64_t> missing = {};  // batches before `sequence` that are left, as in RequestOrderOptions
  uint32_t shard_id = 0;
  uint64_t seed = 0;  // of the prefixes' random draws for the epoch's batches
};

// Thread-compatible: the methods are for one trainer thread; retire_held() and the counters may be used from any.
class Client {
 public:
  // A client of local workers. Each receives its end of a channel.
  explicit Client(const ClientOptions& options);
  // A client of the workers of `source`; `worker_count` is 1.
  Client(const ClientOptions& options, std::unique_ptr<BatchSource> source);
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  ~Client();

  // For local workers, before start(), once each: as in ClientIo.
  Result<ChannelFds> open_channel(uint32_t worker_id);
  Result<void> note_started(uint32_t worker_id, pid_t pid);

  // Starts the I/O thread. Call it after the last worker was forked.
  Result<void> start();

  // Forgets the requests of the previous epoch, and the early ones, and announces a new epoch to the workers, with its
  // `seeds` (a pickle). Without seeds the first epoch is not announced: a worker's start is also the start of its first
  // epoch.
  void begin_epoch(std::span<const std::byte> seeds = {}, const EpochStart& first = {});

  // Ends the epoch for the trainer: batches requested and not delivered are dropped on arrival, which frees their
  // memory.
  void drop_rest();

  // Starts the next epoch while this one ends: its batches can be requested, and wait until adopt_early().
  void begin_early(std::span<const std::byte> seeds, uint64_t seed);
  // Makes the early epoch the current one, with its batches that have arrived.
  void adopt_early();
  bool has_early() const;

  // Sends one request to the worker of the shard whose turn it is, in the early epoch if there is one, otherwise in
  // this epoch. Returns false, sending no request, if no shard has data left.
  bool submit(const IndexSource::Indices& indices);

  // Whether one more request stays within prefetch_factor batches per worker and within prefetch_bytes, where a batch
  // that has not arrived counts as the largest so far. One request is always within prefetch_bytes, and before the very
  // first batch has arrived, only one.
  bool has_room() const;
  // Limit on the batches requested and not delivered: prefetch_factor for each current worker, and more for pool
  // workers if batches are small and quickly made (session::kQuickDepth).
  uint32_t depth() const;
  // Batches that were requested and not delivered, whether or not they have arrived.
  uint32_t undelivered_count() const;
  // The number of shards in which a dataset is read.
  uint32_t shard_count() const;
  // Whether any worker may make any batch.
  bool may_any_worker() const;
  // The current number of workers, and the link to them: as in BatchSource.
  uint32_t worker_count() const;
  std::optional<LinkStanding> link() const;
  wire::JobCosts costs() const;          // of a pool's workers
  uint64_t largest_batch_bytes() const;  // 0 before the first has arrived
  // Whether the number of workers can change.
  bool is_elastic() const;
  // Whether batches may lack leaves that only other ranks read.
  bool has_leaves_by_rank() const;

  struct Event {
    enum class Kind : uint8_t {
      kBatch,
      kShardEnded,  // a shard is exhausted; submit one request in its place
      kWorkerLost,  // the worker closed its connection without a dismissal
      kWorkerGone,  // the same, where others make its outstanding batches
      kEnd,         // no more events follow in this epoch
      kMoreRoom,    // the limit on requests has increased
      kNews,        // `error` contains a message for the user; no failure
      kNothing,     // no event before the deadline
      kFailed,      // `error` describes how the connection between the processes failed
    };
    Kind kind = Kind::kNothing;
    uint32_t worker_id = 0;
    uint32_t shard_id = 0;           // of kBatch and kShardEnded
    bool is_worker_done = false;     // of kShardEnded: it was the worker's last one
    bool is_unreadable = false;      // of kBatch: the user receives an error in its place
    std::vector<std::byte> state{};  // of kShardEnded: the final state of the shard's dataset, if it has one
    std::unique_ptr<Batch> batch;
    std::optional<Fault> error;

    std::string_view message() const { return error ? std::string_view(error->message) : std::string_view(); }
  };

  // Returns the next event, if one has arrived. Never blocks.
  Event try_next();
  // Counts a batch that the user received.
  void count_delivered(const Batch& batch);
  // Waits for an arrival until `deadline`; then call try_next(). Blocks; needs no lock of the caller's.
  bool wait_until(std::chrono::steady_clock::time_point deadline);

  // Requests the whole of a batch that arrived without some of its leaves.
  void recall(const BatchRecord::Origin& origin);
  // Returns the batch that was recalled, or the dataset's error in its place. kTimeout at the deadline, kClosed if no
  // more arrivals can follow. Blocks; needs no lock of the caller's.
  Result<std::unique_ptr<Batch>> recalled(const BatchRecord::Origin& origin,
                                          std::chrono::steady_clock::time_point deadline);
  // Call when the recalled batch is no longer awaited.
  void forget_recall(const BatchRecord::Origin& origin);

  // The request whose answer the trainer awaits: the oldest one if the order is free. nullopt if no request is
  // outstanding, and always without keep_indices.
  struct Awaited {
    uint32_t worker_id = 0;
    uint64_t sequence = 0;
    wire::IndexKind index_kind = wire::IndexKind::kNone;
    std::vector<std::byte> indices;
  };
  std::optional<Awaited> awaited() const;

  // Makes local workers answer with the states of their datasets from the next request on, about every `every` batches.
  // If `question` is not 0, each worker answers it with the states of its shards, for worker_states().
  void want_states(uint64_t every, uint64_t question);
  // Returns one worker's answer, in a format that only the worker defines. kTimeout at the deadline. Blocks; needs no
  // lock of the caller's.
  Result<std::vector<std::byte>> worker_states(std::chrono::steady_clock::time_point deadline);

  // Sends a message to every worker, immediately and in order with the surrounding requests.
  void broadcast(wire::ToJob::Kind kind, std::span<const std::byte> body);

  // Closes the connection to every worker and joins the I/O thread. Delivered batches stay valid.
  void stop();

  // Called before this process forks: slabs that the user holds will not be overwritten, so that the child may read
  // them.
  void retire_held();

  // The time breakdown of the trainer's steps.
  StepLedger& ledger();

  const loader::LoaderCounters& counters() const;
  uint32_t outstanding_count() const;       // requested and not arrived
  uint32_t stored_count() const;            // arrived, processed by try_next() and not delivered
  uint32_t ready_count() const;             // stored_count() plus the arrivals not processed yet
  void note_pace(const TrainerPace& pace);  // for the controller of a pool

 private:
  class Impl;
  ProcessBound<Impl> impl_;
};

}  // namespace penstock::loader
