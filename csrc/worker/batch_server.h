// SPDX-License-Identifier: Apache-2.0
#pragma once
// The batch-making half of a pool worker. BatchServer is the interface for the thread that makes batches, regardless of
// the source of its work; KeptBatches keeps the batches whose leaves stayed here. PoolServer is a whole worker in one
// process: a BatchServer, and the thread that communicates with trainers and the controller.

#include <ATen/core/Tensor.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "base/result.h"
#include "dataset/fetch_clock.h"
#include "server/maker.h"
#include "server/pool_server_io.h"
#include "server/work_exchange.h"
#include "shm/slab_pool.h"
#include "wire/message.h"
#include "worker/batch_maker.h"
#include "worker/prefix_stage.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

constexpr size_t kKeptBatchesMax = 4;

// Batches whose leaves stayed with this worker, for a trainer that reads such a leaf after all. The newest few are kept
// to answer a recall. An older batch is made again, by any worker that is asked.
//
// A kept batch holds the slab that contains its leaves, so the number is small: a trainer reads the batch that it was
// given last, and few have been sent to it since.
//
// Confined to the thread that makes batches.
class KeptBatches {
 public:
  struct Kept {
    uint64_t trainer_id = 0;
    wire::BatchKey key{};
    std::vector<at::Tensor> tensors;
    std::vector<std::string> boundary_keys;
    std::vector<std::byte> nest;
    uint8_t flags = 0;

    BatchContent content() const { return {.tensors = tensors, .boundary_keys = boundary_keys, .nest = nest}; }
  };

  // Keeps a batch, and drops the oldest if there are too many. `bytes_max` bounds the bytes of one batch.
  void keep(uint64_t trainer_id, wire::BatchKey key, const BatchContent& content, uint8_t flags, uint64_t bytes_max) {
    if (!batches_.empty() && batches_.front().trainer_id != trainer_id) batches_.clear();
    uint64_t bytes = 0;
    for (const at::Tensor& tensor : content.tensors) bytes += tensor.storage().nbytes();
    if (bytes > bytes_max) return;
    std::erase_if(batches_, [&](const Kept& kept) { return kept.key == key; });
    if (batches_.size() >= kKeptBatchesMax) batches_.pop_front();
    batches_.push_back({.trainer_id = trainer_id,
                        .key = key,
                        .tensors = content.tensors,
                        .boundary_keys = content.boundary_keys,
                        .nest = {content.nest.begin(), content.nest.end()},
                        .flags = flags});
  }

  // Null if the batch is not, or no longer, kept.
  const Kept* find(uint64_t trainer_id, wire::BatchKey key) const {
    const auto found = std::find_if(batches_.begin(), batches_.end(),
                                    [&](const Kept& kept) { return kept.trainer_id == trainer_id && kept.key == key; });
    return found == batches_.end() ? nullptr : &*found;
  }

 private:
  std::deque<Kept> batches_;  // oldest first
};

// Batches that are ready or in transit to the trainer, in addition to the one being made. The trainer takes them as
// they arrive, so two hide the time in transit.
constexpr uint32_t kBatchesAhead = 4;

// The metadata of a batch.
struct PoolMarks {
  uint8_t flags = 0;                           // wire::kPoolAnswerFlags
  std::vector<std::byte> state{};              // of the dataset after the batch
  uint32_t sample_count = 0;                   // in the batch
  uint64_t dataset_size = wire::kSizeUnknown;  // as PoolAnswer's
  bool may_be_kept = false;                    // as PoolResult's, of work with a name
  bool draws_nothing = false;
};

// The interface for the thread that makes batches in a pool worker, regardless of the source of its work: it allocates
// memory for batches, runs prefixes on them, seals them, and passes the results to the work source. It needs no socket.
//
// Confined to the thread that makes batches, except for writer()'s thread-safe calls and drain().
class BatchServer {
 public:
  using Deadline = server::WorkSource::Deadline;

  // `is_closing` ends a wait for a slab. Both references must outlive this object.
  BatchServer(server::WorkSource& source, const shm::SlabPoolOptions& slabs, const std::atomic<bool>& is_closing);
  BatchServer(const BatchServer&) = delete;
  BatchServer& operator=(const BatchServer&) = delete;

  // The next unit of work, which must be answered, given up or declined before the next call. kTimeout at the deadline.
  // After this worker has ended: kClosed, or kFailed if someone has to act on it. Blocks.
  Result<std::shared_ptr<const server::PoolWork>> next(Deadline deadline) { return source_.next(deadline); }
  // A blob of the current work, unchecked. As WorkSource::blob. Blocks.
  Result<std::vector<std::byte>> blob(const wire::BlobId& id, Deadline deadline) { return source_.blob(id, deadline); }
  bool is_wanted() const { return source_.is_wanted(); }
  std::vector<std::string> take_notices() { return source_.take_notices(); }
  server::Standing standing() const { return source_.standing(); }

  PrefixCache& prefixes() { return prefix_cache_; }
  SlabWriter& writer() { return maker_.writer(); }
  // The pool that contains its batches.
  shm::SlabPool& pool() { return maker_.pool(); }

  // Runs the prefixes of the work on its batch and passes the result on for sending. kTooLarge if the batch or the
  // state exceeds the size limit of a message.
  Result<void> answer(const server::PoolWork& work, BatchContent content, PoolMarks marks);
  // Answers the recall of a batch whose leaves are still kept here. Returns false if they are not.
  Result<bool> answer_kept(const server::PoolWork& work);
  // The shard is exhausted.
  void answer_end(const server::PoolWork& work);
  struct Failure {
    std::string type_name;
    std::string text;
  };
  // kTooLarge as for a batch.
  Result<void> answer_error(const server::PoolWork& work, const Failure& failure, std::vector<std::byte> state);
  // The batch is no longer wanted.
  void give_up();
  // This worker cannot make the batches that the trainer requests.
  void decline(std::string reason);
  // This process can make no more batches, but another may: hands the work back, and drains.
  void leave(std::string reason);

  // Accepts no more work; next() ends once all started work has been taken.
  void drain() { source_.drain(); }

 private:
  // Records the cost of the work so far.
  static void note_cost(const server::PoolWork& work, server::PoolResult& result);
  Result<void> send(const server::PoolWork& work, MadeBatch made, PoolMarks marks,
                    const dataset::FetchClock::Times& times);

  server::WorkSource& source_;
  const uint64_t kept_bytes_max_;  // of one batch
  BatchMaker maker_;
  PrefixCache prefix_cache_;
  KeptBatches kept_;
};

// The members that must outlive the base that takes work from them.
struct OwnExchange {
  server::WorkExchange exchange;
};

// A pool worker: takes requests of the trainer it is assigned to, allocates memory for batches, and sends finished
// batches in chunks. A separate thread communicates with trainers and the controller (server/pool_server_io.h); this
// class is its interface for the thread that makes batches.
//
// Like its base: confined to the thread that makes batches.
class PoolServer : private OwnExchange, public BatchServer {
 public:
  // Listens, and starts to report to the controller, which may start later.
  static Result<std::unique_ptr<PoolServer>> start(server::PoolServerOptions options);

  // For `start`.
  PoolServer(server::PoolServerOptions options, const net::RunId& run);
  PoolServer(const PoolServer&) = delete;
  PoolServer& operator=(const PoolServer&) = delete;
  ~PoolServer();

  // For a unique_ptr that a forked child may inherit. The child has neither the thread nor the sockets, so it leaves
  // the object alone.
  struct Deleter {
    void operator()(PoolServer* server) const {
      if (server->owner_pid_ == ::getpid()) std::default_delete<PoolServer>()(server);
    }
  };
  using Handle = std::unique_ptr<PoolServer, Deleter>;

  uint64_t worker_id() const { return worker_id_; }
  const net::Endpoint& endpoint() const { return io_.endpoint(); }
  const std::string& advertised() const { return io_.advertised(); }
  const net::Endpoint& data_endpoint() const { return io_.data_endpoint(); }
  const std::string& data_advertised() const { return io_.data_advertised(); }
  int signal_fd() const { return io_.signal_fd(); }

  // Ends immediately.
  void close() { loop_.stop(); }

 private:
  const server::PoolServerOptions options_;
  const uint64_t worker_id_;
  const pid_t owner_pid_ = ::getpid();
  server::PoolServerIo io_;
  EventLoop loop_;
};

}  // namespace penstock::worker
