// SPDX-License-Identifier: Apache-2.0
#pragma once
// The path of arrivals to the inbox. If the trainer requested pinned memory or a device, each batch passes the stages
// for that on a separate thread, so that the thread that answers leases neither copies nor calls a driver. The same
// thread widens the narrow tensors of pool workers, and shows arrivals to a tap (inbox.h). If none of these are
// needed, the thread is not started.
//
// A batch is *staged* from when it has passed the stages until it is delivered to the trainer. While `staged_bytes_max`
// bytes are staged, further batches wait on the host. One batch may always pass, and so may the one that the trainer
// waits for, since all staged batches may follow it. So at most the limit and one batch are staged. A batch for which
// the device has no memory waits as well, until the trainer waits for it: then it is tried once more, and if that fails
// the trainer receives the error in its place.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "base/event_loop.h"
#include "base/result.h"
#include "device/device.h"
#include "loader/batch_memory.h"
#include "loader/batch_stage.h"
#include "loader/inbox.h"
#include "wire/message.h"

namespace penstock::loader {

struct Stages {
  std::vector<std::unique_ptr<BatchStage>> in_order;
  uint64_t staged_bytes_max = 0;  // 0: no limit. Narrow tensors count with their narrow and their widened bytes
  // Size of the memory that narrow tensors are widened into; nullopt if none arrive.
  std::optional<uint64_t> wide_bytes{};
  // Sees arrivals before they pass the stages, on the chain's thread. Shared with the owner, which keeps it for the
  // next source.
  std::shared_ptr<ArrivalTap> tap = {};
};

// arrive(), fail() and takes_narrow() are for the receiving thread; start() and stop() for the owner's; retire_held()
// for any; the rest for the trainer's.
class StageChain : private EventLoop::Handler {
 public:
  // `inbox` outlives the chain. At most `arrival_count_max` batches wait.
  StageChain(Inbox& inbox, size_t arrival_count_max);
  ~StageChain() override;

  Result<void> start(Stages stages);
  // Stops the flow of arrivals; a thread that is blocked while handing an arrival over continues.
  void close();
  // A batch is requested. For the trainer's thread.
  void asked(const session::RequestContent& content) {
    if (stages_.tap) stages_.tap->asked(content);
  }
  // Joins the thread, and waits for the running copies. Empties the inbox, which must be closed.
  void stop();

  // Whether batches may arrive with tensors that were kept narrow (Batch::try_keep_narrow), because a device widens
  // them. Constant from start() on.
  bool takes_narrow() const { return takes_narrow_; }

  // See BatchMemory::retire_held.
  void retire_held() {
    if (wide_memory_) wide_memory_->retire_held();
  }

  // Batches of one epoch may arrive in any order; other arrivals never wait for a batch's room.
  void arrive(Arrival arrival);
  void fail(uint32_t worker_id, const Fault& error);

  // The trainer waits for this batch: without a sequence, for any batch of the epoch.
  void await(uint32_t epoch, std::optional<uint64_t> sequence);
  // Called just before the trainer receives the batch. Returns the error of a stage, or of the tap.
  Result<void> finish(Batch& batch);

 private:
  using BatchKey = wire::BatchKey;
  struct Awaited {
    uint32_t epoch = 0;
    std::optional<uint64_t> sequence;
  };
  struct Waiting {
    Arrival arrival;
    size_t stage_index = 0;  // the next stage
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
  // Whether the batch's epoch is over.
  bool is_stale(const BatchKey& key) const;
  void drop_stale();
  void let_through();
  std::optional<Next> find_next();
  bool has_room_for(const Batch& batch) const;
  // Returns false if the device has no memory and the batch keeps waiting.
  bool try_stage(Waiting& waiting, bool is_awaited);

  Inbox& inbox_;
  const size_t waiting_count_max_;
  bool takes_narrow_ = false;
  Stages stages_;
  device::StagedBytes staged_;
  BoundedQueue<Arrival> arrivals_;
  std::optional<BatchMemory> wide_memory_;  // constant from start() on

  // Confined to the chain's thread, once it runs.
  WaitingBatches waiting_;
  std::optional<Awaited> awaited_;     // until a batch has passed because of it
  std::optional<uint64_t> full_at_{};  // the staged bytes when the device had no memory left
  size_t copy_count_ = 0;              // running

  std::atomic<size_t> waiting_count_{0};
  std::unique_ptr<EventLoop> loop_;  // only if the thread is needed
};

}  // namespace penstock::loader
