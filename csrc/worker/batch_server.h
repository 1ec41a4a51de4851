// SPDX-License-Identifier: Apache-2.0
#pragma once
// The interface for the thread that makes batches in a pool worker, regardless of the source of its work: it allocates
// memory for batches, runs prefixes on them, seals them, and passes the results to the work source. It needs no socket.

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

// Batches that are ready or in transit to the trainer, in addition to the one being made. The trainer takes them as
// they arrive, so two hide the time in transit.
constexpr uint32_t kBatchesAhead = 4;

// The metadata of a batch.
struct PoolMarks {
  uint8_t flags = 0;                          // wire::kPoolAnswerFlags
  std::vector<std::byte> state{};             // of the dataset after the batch
  uint32_t sample_count = 0;                  // in the batch
  uint64_t dataset_size = wire::kSizeUntold;  // as PoolAnswer's
};

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

}  // namespace penstock::worker
