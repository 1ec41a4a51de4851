// SPDX-License-Identifier: Apache-2.0
#pragma once
// The shared memory in which a trainer reads its batches. BatchMemory has the slabs for batches from other hosts;
// workers on this machine pass the arenas of their batches as descriptors (PassedMemory, HandedOverMemory). Either way
// a batch holds a SlabLease, the right to read its slab, and ArenaViews lists the mapped arenas, so that they can be
// retired before a fork.

#include <c10/util/intrusive_ptr.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/result.h"
#include "loader/counters.h"
#include "shm/arena.h"
#include "shm/channel.h"
#include "shm/slab_pool.h"
#include "wire/message.h"

namespace penstock::loader {

// Releases slabs in place of their leases, for slabs that a device may read after the last tensor has died.
// Thread-safe.
class SlabKeeper {
 public:
  SlabKeeper() = default;
  SlabKeeper(const SlabKeeper&) = delete;
  SlabKeeper& operator=(const SlabKeeper&) = delete;
  virtual ~SlabKeeper() = default;

  // Called once, when this process has no more references to the slab: releases it now or later, or retires it.
  virtual void lease_ended(std::shared_ptr<shm::ArenaView> view, uint32_t slab_index, uint32_t generation) = 0;
};

// The right to read one slab. Every tensor on the slab shares the lease; when the last of them dies, the slab is
// released to its worker. A child that was forked while tensors were alive inherits copies of them, and must not
// release the parent's slab when it drops its copies: a lease releases only in the process that took it.
//
// Thread-safe: the reference count is atomic and the destructor runs once.
class SlabLease : public c10::intrusive_ptr_target {
 public:
  // The view is shared by the client, which finds slabs in it, and by every lease on it.
  SlabLease(std::shared_ptr<shm::ArenaView> view, uint32_t slab_index, uint32_t generation)
      : view_(std::move(view)), slab_index_(slab_index), generation_(generation), owner_pid_(::getpid()) {}
  SlabLease(const SlabLease&) = delete;
  SlabLease& operator=(const SlabLease&) = delete;

  ~SlabLease() override {
    if (::getpid() != owner_pid_) return;
    if (keeper_) {
      keeper_->lease_ended(std::move(view_), slab_index_, generation_);
    } else {
      view_->release(slab_index_, generation_);
    }
  }

  std::byte* data() const { return view_->slab(slab_index_); }
  shm::ArenaView& view() const { return *view_; }
  const std::shared_ptr<shm::ArenaView>& shared_view() const { return view_; }
  uint32_t slab_index() const { return slab_index_; }

  // From now on the user may hold tensors on this slab.
  void mark_held() { view_->set_held(slab_index_, true); }

  // Makes `keeper` release the slab. Call before the lease is shared with another thread.
  void set_keeper(std::shared_ptr<SlabKeeper> keeper) { keeper_ = std::move(keeper); }

  // Prevents all further writes to the slab, because it may be read after the lease has ended.
  void retire() { view_->retire(slab_index_); }

 private:
  std::shared_ptr<shm::ArenaView> view_;
  uint32_t slab_index_;
  uint32_t generation_;
  pid_t owner_pid_;
  std::shared_ptr<SlabKeeper> keeper_;  // shared with the stage that pinned the slab, and its other leases
};

// The arenas that a trainer has mapped, to be retired before it forks. Thread-safe.
class ArenaViews {
 public:
  void add(const std::shared_ptr<shm::ArenaView>& view) {
    MutexLock lock(mutex_);
    std::erase_if(views_, [](const auto& old) { return old.expired(); });
    views_.emplace_back(view);
  }

  // Called before this process forks: calls shm::ArenaView::retire_held on every mapped arena.
  void retire_held() {
    MutexLock lock(mutex_);
    for (const auto& weak : views_) {
      if (const auto view = weak.lock()) view->retire_held();
    }
  }

 private:
  Mutex mutex_;
  std::vector<std::weak_ptr<shm::ArenaView>> views_ PENSTOCK_GUARDED_BY(mutex_);
};

// The memory that a worker on this machine passes to its trainer, as descriptors over a channel: arenas whose slabs
// contain its batches. Confined to the I/O thread.
class PassedMemory {
 public:
  // `views` and the counter `arenas` outlive this; both record every arena.
  PassedMemory(ArenaViews& views, Counter& arenas) : views_(views), arena_count_(arenas) {}

  // Maps an arena. kMalformed if the file is not an arena, kNoMemory.
  Result<void> take_arena(uint32_t arena_id, const FileDescriptor& fd);
  bool has_arena(uint32_t arena_id) const { return arenas_.contains(arena_id); }

  // Returns the right to read a batch's slab. kMalformed if there is no such slab.
  Result<c10::intrusive_ptr<SlabLease>> lease(const wire::SlabPlace& place);

 private:
  ArenaViews& views_;
  Counter& arena_count_;
  std::map<uint32_t, std::shared_ptr<shm::ArenaView>> arenas_;  // shared with the leases on their slabs
};

// PassedMemory for a worker whose batches are named in messages on another connection (server/answer_outbox.h). The
// worker passes an arena before it names it, and a passed descriptor can be received immediately, so no call waits.
// Confined to the I/O thread.
class HandedOverMemory {
 public:
  HandedOverMemory(shm::Channel channel, ArenaViews& views, Counter& arenas)
      : channel_(std::move(channel)), memory_(views, arenas) {}

  // As PassedMemory::lease. kClosed if the worker closed the channel.
  Result<c10::intrusive_ptr<SlabLease>> lease(const wire::SlabPlace& place);

 private:
  Result<void> receive_arena();

  shm::Channel channel_;
  PassedMemory memory_;
};

struct LeasedSlab {
  c10::intrusive_ptr<SlabLease> lease;
  bool is_transient = false;                // in a single-use arena
  uint64_t backed_bytes = 0;                // bytes of the slab that have memory
  std::optional<shm::SlabRegion> region{};  // of a growing slab
};

// The trainer's slabs for batches from other hosts. They belong to an arena like a local worker's, so that leases,
// device copies and forks treat such a batch like any other.
//
// Confined to the receiving thread, except retire_held(), which any thread may call.
class BatchMemory {
 public:
  explicit BatchMemory(uint64_t arena_bytes);

  // Returns a slab of at least `bytes`, a size derived from a worker's claim. Never waits: a batch that does not fit
  // into the arena while the user holds much of it gets a separate arena. Errors: kNoMemory if the system has none;
  // kTooLarge if such a size is implausible given the batches so far.
  Result<LeasedSlab> take(uint64_t bytes) { return take(bytes, bytes); }
  // The same for any size and without memory, for a caller that fills the slab chunk by chunk and calls grow() first. A
  // worker's claim then costs only addresses until its bytes arrive. Moreover, the system needs longer to find memory
  // for a batch of gigabytes than a thread that answers leases may be blocked.
  Result<LeasedSlab> take_growing(uint64_t bytes) { return take(bytes, 0); }
  // Gives the first `bytes` of a growing slab memory. kNoMemory.
  static Result<void> grow(LeasedSlab& slab, uint64_t bytes);

  // Records the size of a batch that has arrived.
  void note_received(uint64_t bytes) { largest_bytes_ = std::max(largest_bytes_, bytes); }
  // The size of the largest batch so far.
  uint64_t largest_bytes() const { return largest_bytes_; }

  void retire_held() { views_.retire_held(); }

 private:
  Result<LeasedSlab> take(uint64_t bytes, uint64_t backed_bytes);
  Result<std::shared_ptr<shm::ArenaView>> view_of(const shm::SlabRegion& region);

  uint64_t largest_bytes_ = 0;
  std::atomic<bool> is_closing_{false};
  shm::SlabPool pool_;
  uint32_t arena_id_ = 0;  // id of the arena of view_
  std::shared_ptr<shm::ArenaView> view_;
  ArenaViews views_;
};

}  // namespace penstock::loader
