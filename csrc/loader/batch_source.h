// SPDX-License-Identifier: Apache-2.0
#pragma once
// The source of a client's batches (BatchSource): local workers (client_io.h), pool workers
// (pool_client/pool_client.h), or threads of its process (thread_source.h). A source receives requests and the
// trainer's pace, and reports the speed of its link.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/clock.h"
#include "base/result.h"
#include "loader/batch.h"
#include "loader/inbox.h"
#include "loader/stage_chain.h"
#include "session/request_order.h"
#include "session/step_clock.h"
#include "wire/job_record.h"
#include "wire/reports.h"

namespace penstock::loader {

// A trainer's pace, as observed by its own thread, for the thread that reports to a pool's controller.
struct TrainerPace {
  uint32_t stored_count = 0;  // batches that the trainer's thread has and the program has not received
  uint32_t wanted_count = 0;  // target for batches that are here or requested
  session::StepTimes steps{};
  bool is_in_epoch = false;
  Instant given_at{};    // the time of the last delivery
  Duration pause_min{};  // see StepClock
};

// The measured speed of the link. Zero: unknown so far.
struct LinkStanding {
  double bytes_per_s = 0;  // from all workers together
  double round_trip_s = 0;
};

// The ends of the channel between a trainer and a local worker. The client keeps ownership.
struct ChannelFds {
  int trainer = -1;
  int worker = -1;
};

// Threads of the source carry out the calls below, and arrivals pass through the stages to the inbox.
//
// start() and stop() are for the owner's thread; retire_held() for any; the rest for the trainer's.
class BatchSource {
 public:
  explicit BatchSource(size_t arrival_count_max) : inbox_(arrival_count_max), stages_(inbox_, arrival_count_max) {}
  BatchSource(const BatchSource&) = delete;
  BatchSource& operator=(const BatchSource&) = delete;
  virtual ~BatchSource() = default;

  virtual Result<void> start(Stages stages) = 0;
  virtual void stop() = 0;

  // Requests one batch. The source may add to the content; afterwards it is immutable.
  virtual void fetch(const std::shared_ptr<session::RequestContent>& content) = 0;
  // Requests the whole of a batch that arrived without some of its leaves; it arrives through Inbox::try_recalled().
  // Only for sources with such batches.
  virtual void recall(const BatchRecord::Origin&) {
    PENSTOCK_ASSERT(false, "no tensor of these batches is fetched lazily");
  }
  // Call when the recalled batch is no longer awaited.
  virtual void forget_recall(const BatchRecord::Origin&) {}
  // Sends a message to every worker: a new epoch, or the prefixes to run.
  virtual void announce(const wire::ToJob& message) = 0;
  // Dismisses a worker that has no work left.
  virtual void dismiss(uint32_t worker_id) = 0;

  // The worker that serves a shard, if that is fixed.
  virtual uint32_t worker_of(uint32_t shard_id) const = 0;
  // The current number of workers. It determines the number of batches requested ahead.
  virtual uint32_t worker_count() const = 0;
  // The link to remote workers, as far as it is known; nullopt if the workers share this machine's memory.
  virtual std::optional<LinkStanding> link() const { return std::nullopt; }
  // The resources that a pool's workers have spent so far. Thread-safe.
  virtual wire::JobCosts costs() const { return {}; }
  // Whether a worker may have to wait for memory because the user keeps a batch.
  virtual bool has_bounded_memory() const = 0;
  // Reports the trainer's pace; a pool forwards it to its controller.
  virtual void note_pace(const TrainerPace& pace) = 0;

  // Makes the next requested batch on the calling thread, the trainer's, if the source has no other thread. The batch
  // is then in the inbox. Returns false if there is none to make here.
  virtual bool try_make_here() { return false; }

  // Slabs that the user holds will not be overwritten, because this process forks.
  virtual void retire_held() = 0;

  Inbox& inbox() { return inbox_; }
  const Inbox& inbox() const { return inbox_; }
  StageChain& stages() { return stages_; }

 protected:
  Inbox inbox_;
  StageChain stages_;
};

}  // namespace penstock::loader
