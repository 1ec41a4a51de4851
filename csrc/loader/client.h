// SPDX-License-Identifier: Apache-2.0
#pragma once
// The trainer's end of its workers, local ones or those of a pool: requests go out, and batches come back in torch's
// order. The I/O thread of the source owns every socket: it greets workers, sends requests, and turns their answers
// into batches. A stream (stream.h) decides when to ask for which batch; every trainer goes through one.
//
// The thread starts in start(), after the workers were forked. In a forked child a client is inert: its destructor
// leaves everything as it is, because the thread that owns it exists only in the parent.

#include <c10/core/Device.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/process_bound.h"
#include "base/result.h"
#include "cluster/request_order.h"
#include "loader/ahead_stage.h"
#include "loader/batch.h"
#include "loader/batch_source.h"
#include "loader/counters.h"
#include "loader/index_source.h"
#include "loader/step_ledger.h"
#include "wire/batch_facts.h"
#include "wire/job_record.h"

namespace penstock::loader {

// The most bytes of batches that lie on a device before the trainer is given them. They hide the time of a copy, which
// a second batch does already; slow samples are what the batches on the host are for.
inline constexpr uint64_t kStagedBytes = 256 << 20;

struct ClientOptions {
  uint32_t worker_count = 1;
  uint32_t prefetch_factor = 2;
  uint32_t slab_count = 0;   // that a local worker has to answer with; 0: prefetch_factor
  uint32_t shard_count = 0;  // of an iterable dataset; shard s is served by worker s % worker_count. 0: one a worker
  // Bound on the bytes of batches asked for and not delivered, see has_room(), and of those that are copied to a device
  // ahead. 0: none, and kStagedBytes.
  uint64_t prefetch_bytes = 0;
  bool in_order = true;
  // Any worker may make any batch: the one that will answer soonest is asked, and the others make the batches that a
  // dead worker owed. Without this, the worker of a shard makes all of its batches, and its death ends the stream.
  bool any_worker = false;
  bool keep_workers = false;            // persistent workers stay after their share of an iterable dataset has ended
  bool keep_indices = true;             // of requests that were not answered, for awaited()
  bool pin_memory = false;              // deliver every batch in pinned memory (pin_stage.h)
  std::optional<c10::Device> device{};  // that batches are copied to ahead of use
  // Tensors that are copied ahead beside those on the host; null where none ever are. Not with `device`.
  std::shared_ptr<AheadWishes> ahead = {};
  std::shared_ptr<ArrivalTap> tap = {};  // as Stages::tap
};

// Where an epoch begins: later than at its first batch when it is resumed.
struct EpochStart {
  uint64_t sequence = 0;
  uint32_t shard_id = 0;
  uint64_t seed = 0;  // of the random draws of prefixes for its batches
};

// Thread-compatible: the methods are for one trainer thread; retire_held() and the counters may be used from any.
class Client {
 public:
  // A client of local workers. Each is given its end of a channel.
  explicit Client(const ClientOptions& options);
  // A client of the workers that `source` has; `worker_count` is 1.
  Client(const ClientOptions& options, std::unique_ptr<BatchSource> source);
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;
  ~Client();

  // Of local workers, before start(), once for each: as ClientIo.
  Result<ChannelFds> open_channel(uint32_t worker_id);
  Result<void> note_started(uint32_t worker_id, pid_t pid);

  // Starts the I/O thread. Call it after the last worker was forked.
  Result<void> start();

  // Forgets the requests of the epoch before, and the early ones, and tells the workers that a new epoch begins, with
  // its `seeds` (a pickle). Without seeds the first epoch is not announced: a worker's start is that of its first
  // epoch.
  void begin_epoch(std::span<const std::byte> seeds = {}, const EpochStart& first = {});

  // Ends the epoch for the trainer: what was asked for and not delivered is dropped as it comes, and frees its memory.
  void drop_rest();

  // Begins the next epoch while this one ends: its batches can be asked for, and wait until adopt_early().
  void begin_early(std::span<const std::byte> seeds, uint64_t seed);
  // Begins the epoch that was begun early, with the batches that have come of it.
  void adopt_early();
  bool has_early() const;

  // Sends one request to the worker of the shard whose turn it is: of this epoch, or of the one that was begun early.
  // Returns false, sending nothing, when no shard has data left.
  bool submit(const IndexSource::Indices& indices);

  // Whether one more request keeps within prefetch_factor batches a worker and within prefetch_bytes, where a batch
  // that is not here yet counts as the largest seen so far. One request is always within prefetch_bytes, and before the
  // first batch of all has come, only one.
  bool has_room() const;
  // How many batches may be asked for and not delivered: prefetch_factor for each worker that there is now, and of a
  // pool's workers more where batches are small and soon made (cluster::kQuickDepth).
  uint32_t depth() const;
  // Batches that were asked for and not delivered, those that have come included.
  uint32_t undelivered_count() const;
  // In how many shards a dataset is read.
  uint32_t shard_count() const;
  // Whether any worker may make any batch.
  bool may_any_worker() const;
  // How many workers there are now, and the link to them: as BatchSource.
  uint32_t worker_count() const;
  std::optional<LinkStanding> link() const;
  wire::JobCosts costs() const;          // of a pool's workers
  uint64_t largest_batch_bytes() const;  // of those that have come; 0 before the first
  // Whether workers come and go.
  bool is_elastic() const;

  struct Event {
    enum class Kind : uint8_t {
      kBatch,
      kShardEnded,  // a shard is exhausted; submit one request in its place
      kWorkerLost,  // the worker closed its connection without being told to
      kWorkerGone,  // the same, where others make the batches that it owed
      kEnd,         // nothing more will come in this epoch
      kMoreRoom,    // more may be asked for than before
      kNews,        // `error` says something that the user should read; nothing has failed
      kNothing,     // nothing came before the deadline
      kFailed,      // `error` says how the connection between the processes failed
    };
    Kind kind = Kind::kNothing;
    uint32_t worker_id = 0;
    uint32_t shard_id = 0;           // of kBatch and kShardEnded
    bool is_worker_done = false;     // of kShardEnded: it was the worker's last one
    bool is_unreadable = false;      // of kBatch: the user is given an error in its place
    std::vector<std::byte> state{};  // of kShardEnded: of the shard's dataset then, if it has one
    std::unique_ptr<Batch> batch;
    std::optional<Fault> error;

    std::string_view message() const { return error ? std::string_view(error->message) : std::string_view(); }
  };

  // The next event, if it is here already. Never blocks.
  Event try_next();
  // Counts a batch that the user was given.
  void count_delivered(const Batch& batch);
  // Waits for something to arrive until `deadline`; then call try_next(). Blocks; needs no lock of the caller's.
  bool wait_until(std::chrono::steady_clock::time_point deadline);

  // Asks for the whole of a batch that came without some of its leaves.
  void recall(const Batch::Origin& origin);
  // The batch that was recalled, or in its place the error of the dataset. kTimeout at the deadline, kClosed where
  // nothing will come any more. Blocks; needs no lock of the caller's.
  Result<std::unique_ptr<Batch>> recalled(const Batch::Origin& origin, std::chrono::steady_clock::time_point deadline);
  // Nobody waits for it any more.
  void forget_recall(const Batch::Origin& origin);

  // The request whose answer the trainer waits for: with a free order, the oldest one. Nothing when none is out.
  // Without keep_indices there are none.
  struct Awaited {
    uint32_t worker_id = 0;
    uint64_t sequence = 0;
    wire::IndexKind index_kind = wire::IndexKind::kNone;
    std::vector<std::byte> indices;
  };
  std::optional<Awaited> awaited() const;

  // Has local workers answer with the states of their datasets from the next request on, about every `every` batches.
  // With a `question` other than 0 each answers it with those of its shards, and they are there to be taken.
  void want_states(uint64_t every, uint64_t question);
  // The answer of one worker, whose form the worker knows. kTimeout at the deadline. Blocks; needs no lock of the
  // caller's.
  Result<std::vector<std::byte>> worker_states(std::chrono::steady_clock::time_point deadline);

  // Ships a message to every worker, now and in the order of the requests around it.
  void broadcast(wire::ToJob::Kind kind, std::span<const std::byte> body);

  // Hangs up on every worker and joins the I/O thread. Batches that were delivered stay valid.
  void stop();

  // Called before this process forks: slabs that the user holds will not be written again, so that the child may read
  // them.
  void retire_held();

  // Where the time of the trainer's steps goes.
  StepLedger& ledger();

  const loader::LoaderCounters& counters() const;
  uint32_t outstanding_count() const;  // asked for and not here yet
  uint32_t stored_count() const;       // here, looked at and not delivered
  uint32_t ready_count() const;        // the same, with those that were not looked at yet: here and not delivered yet
  void note_pace(const TrainerPace& pace);  // for the controller of a pool

 private:
  class Impl;
  ProcessBound<Impl> impl_;
};

}  // namespace penstock::loader
