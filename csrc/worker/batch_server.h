// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the thread that makes a pool's worker's batches works with, wherever its work comes from: gives out memory for
// batches, runs prefixes on them, seals them, and hands the results over to the source of its work. It needs no socket.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "dataset/fetch_clock.h"
#include "server/pool_work.h"
#include "server/work_source.h"
#include "shm/slab_pool.h"
#include "worker/batch_maker.h"
#include "worker/kept_batches.h"
#include "worker/prefix_cache.h"

namespace penstock::worker {

// Batches that are ready or on their way to the trainer, beside the one that is made. The trainer takes them as they
// come, so that two hide the time on the way.
constexpr uint32_t kBatchesAhead = 4;

// The notes about a batch beside its content.
struct PoolMarks {
  uint8_t flags = 0;                          // wire::kPoolAnswerFlags
  std::vector<std::byte> state{};             // the dataset's after the batch
  uint32_t sample_count = 0;                  // in the batch
  uint64_t dataset_size = wire::kSizeUntold;  // as PoolAnswer's
};

// Confined to the thread that makes batches, but for writer()'s thread-safe calls and drain().
class BatchServer {
 public:
  using Deadline = server::WorkSource::Deadline;

  // `is_closing` ends a wait for a slab. Both references outlive this.
  BatchServer(server::WorkSource& source, const shm::SlabPoolOptions& slabs, const std::atomic<bool>& is_closing);
  BatchServer(const BatchServer&) = delete;
  BatchServer& operator=(const BatchServer&) = delete;

  // The next piece of work, which must be answered, given up or declined before there is another. kTimeout at the
  // deadline. Once this worker has ended: kClosed, or kFailed where somebody has to do something about it. Blocks.
  Result<std::shared_ptr<const server::PoolWork>> next(Deadline deadline) { return source_.next(deadline); }
  // A blob of the work in hand, unchecked. As WorkSource::blob. Blocks.
  Result<std::vector<std::byte>> blob(const wire::BlobId& id, Deadline deadline) { return source_.blob(id, deadline); }
  bool is_wanted() const { return source_.is_wanted(); }
  std::vector<std::string> take_notices() { return source_.take_notices(); }
  server::Standing standing() const { return source_.standing(); }

  PrefixCache& prefixes() { return prefix_cache_; }
  SlabWriter& writer() { return maker_.writer(); }
  // Where its batches lie.
  shm::SlabPool& pool() { return maker_.pool(); }

  // Runs the prefixes of the work on its batch, and hands it over to be sent. kTooLarge when it, or the state, is more
  // than a message may carry.
  Result<void> answer(const server::PoolWork& work, BatchContent content, PoolMarks marks);
  // Answers the recall of a batch whose leaves are still here. False if they are not.
  Result<bool> answer_kept(const server::PoolWork& work);
  // The shard has no more.
  void answer_end(const server::PoolWork& work);
  struct Failure {
    std::string type_name;
    std::string text;
  };
  // kTooLarge as for a batch.
  Result<void> answer_error(const server::PoolWork& work, const Failure& failure, std::vector<std::byte> state);
  // Nobody wants it any more.
  void give_up();
  // This worker cannot make the batches that the trainer asks for.
  void decline(std::string reason);
  // This process can make nothing any more, and another may: hands the work back, and drains.
  void leave(std::string reason);

  // Takes no more work; next() ends once all that was begun has been taken.
  void drain() { source_.drain(); }

 private:
  // Takes in what the work has cost so far.
  static void note_cost(const server::PoolWork& work, server::PoolResult& result);
  Result<void> send(const server::PoolWork& work, MadeBatch made, PoolMarks marks,
                    const dataset::FetchClock::Times& times);

  server::WorkSource& source_;
  const uint64_t kept_bytes_max_;  // of one batch
  BatchMaker maker_;
  PrefixCache prefix_cache_;
  KeptBatches kept_;
};

}  // namespace penstock::worker
