// SPDX-License-Identifier: Apache-2.0
#pragma once
// The way of arrivals to the inbox. Where the trainer asked for pinned memory or for a device, each batch goes through
// the stages for that on a thread of their own, so that the thread that answers leases copies nothing and calls no
// driver. The same thread widens what a pool's workers send narrow, and shows arrivals to a tap (arrival_tap.h).
// Without any of these there is no such thread.
//
// A batch is *staged* once it went through the stages, until the trainer is given it. While `staged_bytes_max` bytes
// are staged, further batches wait on the host. One batch may always go, and so may the one that the trainer waits for,
// since all that are staged may come after it. So at most the bound and one batch are staged. A batch for which the
// device has no memory waits as well, until the trainer waits for it: then it is tried once more, and if that fails the
// trainer is given the error in its place.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/event_loop.h"
#include "base/result.h"
#include "loader/arrival_tap.h"
#include "loader/batch_memory.h"
#include "loader/batch_stage.h"
#include "loader/inbox.h"
#include "loader/staged_bytes.h"
#include "wire/batch_key.h"

namespace penstock::loader {

struct Stages {
  std::vector<std::unique_ptr<BatchStage>> in_order;
  uint64_t staged_bytes_max = 0;  // 0: no bound. Of tensors that came narrow, both their bytes count
  // Of the memory that tensors which come narrow are widened into; none where no such tensors come.
  std::optional<uint64_t> wide_bytes{};
  // Is shown what arrives before it goes through the stages, on the chain's thread. Shared with the owner, who keeps it
  // for the next source.
  std::shared_ptr<ArrivalTap> tap = {};
};

// arrive(), fail() and takes_narrow() are for the thread that receives; start() and stop() for the owner's;
// retire_held() for any; the rest for the trainer's.
class StageChain : private EventLoop::Handler {
 public:
  // `inbox` outlives the chain. At most `arrival_count_max` batches wait.
  StageChain(Inbox& inbox, size_t arrival_count_max);
  ~StageChain() override;

  Result<void> start(Stages stages);
  // Nothing goes through any more; a thread that waits to hand something over goes on.
  void close();
  // A batch is asked for. For the trainer's thread.
  void asked(const cluster::RequestContent& content) {
    if (stages_.tap) stages_.tap->asked(content);
  }
  // Joins the thread, and waits for the copies under way. Empties the inbox, which was closed.
  void stop();

  // Whether batches may arrive with tensors that were left as they came (Batch::try_keep_narrow), because a device
  // widens them. The same from start() on.
  bool takes_narrow() const { return takes_narrow_; }

  // As BatchMemory::retire_held.
  void retire_held() {
    if (wide_memory_) wide_memory_->retire_held();
  }

  // Batches of one epoch come in whatever order; what else arrives never waits for the room of a batch.
  void arrive(Arrival arrival);
  void fail(uint32_t worker_id, const Fault& error);

  // The trainer waits for this batch: without a sequence, for any batch of the epoch.
  void await(uint32_t epoch, std::optional<uint64_t> sequence);
  // The trainer is about to be given the batch. The error of a stage, or of the tap.
  Result<void> finish(Batch& batch);

 private:
  using BatchKey = wire::BatchKey;
  struct Awaited {
    uint32_t epoch = 0;
    std::optional<uint64_t> sequence;
  };
  struct Waiting {
    Arrival arrival;
    size_t stage_index = 0;  // the next one
  };
  using WaitingBatches = std::multimap<BatchKey, Waiting>;

  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void failed(Fault error) override;

  struct Next {
    WaitingBatches::iterator place;
    bool is_awaited;
  };

  void take(Arrival arrival);
  void widen(Arrival& arrival, const NarrowArrival& narrow);
  // Whether its epoch is over.
  bool is_stale(const BatchKey& key) const;
  void drop_stale();
  void let_through();
  std::optional<Next> find_next();
  bool has_room_for(const Batch& batch) const;
  // False where the device has no memory and the batch waits on.
  bool try_stage(Waiting& waiting, bool is_awaited);

  Inbox& inbox_;
  const size_t waiting_count_max_;
  bool takes_narrow_ = false;
  Stages stages_;
  StagedBytes staged_;
  BoundedQueue<Arrival> arrivals_;
  std::optional<BatchMemory> wide_memory_;  // the same from start() on

  // Used by the chain's thread alone, once it runs.
  WaitingBatches waiting_;
  std::optional<Awaited> awaited_;     // until a batch went because of it
  std::optional<uint64_t> full_at_{};  // the bytes that were staged when the device had no memory left
  size_t copy_count_ = 0;              // under way

  std::atomic<size_t> waiting_count_{0};
  std::unique_ptr<EventLoop> loop_;  // only where there are stages
};

}  // namespace penstock::loader
