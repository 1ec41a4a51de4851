// SPDX-License-Identifier: Apache-2.0
#pragma once
// A worker of a pool: takes requests of whichever trainer it is given to, gives out memory for batches, and sends
// finished ones in pieces. A thread of its own talks to trainers and the controller (pool_server_io.h); this class is
// its face for the thread that makes batches.

#include <unistd.h>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/event_loop.h"
#include "base/result.h"
#include "worker/batch_maker.h"
#include "worker/kept_batches.h"
#include "worker/pool_server_io.h"
#include "worker/pool_work.h"
#include "worker/prefix_cache.h"
#include "worker/work_exchange.h"

namespace penstock::worker {

// The notes about a batch beside its content.
struct PoolMarks {
  uint8_t flags = 0;                          // of wire::Descriptor
  std::vector<std::byte> state{};             // the dataset's after the batch
  uint32_t sample_count = 0;                  // in the batch
  uint64_t dataset_size = wire::kSizeUntold;  // as PoolAnswer's
};

// Confined to the thread that makes batches, but for writer()'s thread-safe calls and drain().
class PoolServer {
 public:
  using Deadline = WorkExchange::Deadline;

  // Listens, and begins to report to the controller, which need not be there yet.
  static Result<std::unique_ptr<PoolServer>> start(PoolServerOptions options);

  // For `start`.
  PoolServer(PoolServerOptions options, const net::RunId& run);
  PoolServer(const PoolServer&) = delete;
  PoolServer& operator=(const PoolServer&) = delete;
  ~PoolServer();

  // For a unique_ptr that a forked child may inherit, which has neither the thread nor the sockets: it leaves all of it
  // alone.
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

  // The next piece of work, which must be answered, given up or declined before there is another. kTimeout at the
  // deadline. Once this worker has ended: kClosed, or kFailed where somebody has to do something about it. Blocks.
  Result<std::shared_ptr<const PoolWork>> next(Deadline deadline) { return exchange_.next(deadline); }
  // A blob of the work in hand, unchecked. As WorkExchange::blob. Blocks.
  Result<std::vector<std::byte>> blob(const wire::BlobId& id, Deadline deadline) {
    return exchange_.blob(id, deadline);
  }
  bool is_wanted() const { return exchange_.is_wanted(); }
  std::vector<std::string> take_notices() { return exchange_.take_notices(); }
  Standing standing() const { return exchange_.standing(); }

  PrefixCache& prefixes() { return prefix_cache_; }
  SlabWriter& writer() { return maker_.writer(); }

  // Runs the prefixes of the work on its batch, and hands it over to be sent. kTooLarge when it, or the state, is more
  // than a message may carry.
  Result<void> answer(const PoolWork& work, BatchContent content, PoolMarks marks);
  // Answers the recall of a batch whose leaves are still here. False if they are not.
  Result<bool> answer_kept(const PoolWork& work);
  // The shard has no more.
  void answer_end(const PoolWork& work);
  struct Failure {
    std::string type_name;
    std::string text;
  };
  // kTooLarge as for a batch.
  Result<void> answer_error(const PoolWork& work, const Failure& failure, std::vector<std::byte> state);
  // Nobody wants it any more.
  void give_up();
  // This worker cannot make the batches that the trainer asks for.
  void decline(std::string reason);
  // This process can make nothing any more, and another may: hands the work back, and drains.
  void leave(std::string reason);

  // Takes no more work; next() ends once all that was begun has been taken.
  void drain() { exchange_.drain(); }
  // Ends at once.
  void close() { loop_.stop(); }

 private:
  // Takes in what the work has cost so far.
  static void note_cost(const PoolWork& work, PoolResult& result);
  Result<void> send(const PoolWork& work, MadeBatch made, PoolMarks marks, const dataset::FetchClock::Times& times);

  const PoolServerOptions options_;
  const uint64_t worker_id_;
  const pid_t owner_pid_ = ::getpid();
  WorkExchange exchange_;
  BatchMaker maker_;
  PrefixCache prefix_cache_;
  KeptBatches kept_;
  PoolServerIo io_;
  EventLoop loop_;
};

}  // namespace penstock::worker
