// SPDX-License-Identifier: Apache-2.0
#pragma once
// The source of a client's batches: workers of its own (client_io.h), those of a pool (pool_io.h), or threads of its
// process (thread_source.h). Threads of the source carry out the calls below, and what arrives goes through the stages
// to the inbox.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "base/assert.h"
#include "base/result.h"
#include "cluster/request_content.h"
#include "loader/batch.h"
#include "loader/inbox.h"
#include "loader/stage_chain.h"
#include "loader/trainer_pace.h"
#include "wire/job_record.h"
#include "wire/reports.h"

namespace penstock::loader {

// How fast batches come. Zero: not known yet.
struct LinkStanding {
  double bytes_per_s = 0;  // from all workers together
  double round_trip_s = 0;
};

// The ends of the channel between a trainer and its own worker. They stay the client's.
struct ChannelFds {
  int trainer = -1;
  int worker = -1;
};

// start() and stop() are for the owner's thread; retire_held() for any; the rest for the trainer's.
class BatchSource {
 public:
  explicit BatchSource(size_t arrival_count_max) : inbox_(arrival_count_max), stages_(inbox_, arrival_count_max) {}
  BatchSource(const BatchSource&) = delete;
  BatchSource& operator=(const BatchSource&) = delete;
  virtual ~BatchSource() = default;

  virtual Result<void> start(Stages stages) = 0;
  virtual void stop() = 0;

  // Asks for one batch. The source may add to the content, which nobody changes after that.
  virtual void fetch(const std::shared_ptr<cluster::RequestContent>& content) = 0;
  // Asks for the whole of a batch that came without some of its leaves; it comes as Inbox::try_recalled(). For a source
  // whose batches do.
  virtual void recall(const Batch::Origin&) { PENSTOCK_ASSERT(false, "nothing was left out of these batches"); }
  // Nobody waits for it any more.
  virtual void forget_recall(const Batch::Origin&) {}
  // Tells every worker something: that an epoch begins, which prefixes to run.
  virtual void announce(const wire::ToJob& message) = 0;
  // A worker has nothing left to do and must go.
  virtual void dismiss(uint32_t worker_id) = 0;

  // Which worker serves a shard, as far as that is fixed.
  virtual uint32_t worker_of(uint32_t shard_id) const = 0;
  // The number of workers now. The number of batches asked for ahead follows from it.
  virtual uint32_t worker_count() const = 0;
  // The link to workers elsewhere, as far as it is known; none where the workers share this machine's memory.
  virtual std::optional<LinkStanding> link() const { return std::nullopt; }
  // What a pool's workers have spent so far. Thread-safe.
  virtual wire::JobCosts costs() const { return {}; }
  // Whether a batch that the user keeps can make a worker wait for memory.
  virtual bool has_bounded_memory() const = 0;
  // How the trainer fares; of a pool, for its controller.
  virtual void note_pace(const TrainerPace& pace) = 0;

  // Makes the next batch that was asked for on the calling thread, that of the trainer, where the source has no other.
  // It is in the inbox then. False where there is none to make here.
  virtual bool try_make_here() { return false; }

  // Slabs that the user holds will not be written again, since this process forks.
  virtual void retire_held() = 0;

  Inbox& inbox() { return inbox_; }
  const Inbox& inbox() const { return inbox_; }
  StageChain& stages() { return stages_; }

 protected:
  Inbox inbox_;
  StageChain stages_;
};

}  // namespace penstock::loader
