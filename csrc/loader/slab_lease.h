// SPDX-License-Identifier: Apache-2.0
#pragma once
// The right to read one slab. Every tensor on the slab shares the lease; when the last of them dies, the slab is
// released to its worker. A child that was forked while tensors were alive inherits copies of them, and must not
// release the parent's slab when it drops its copies: a lease releases only in the process that took it.

#include <c10/util/intrusive_ptr.h>
#include <unistd.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "shm/arena.h"

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

}  // namespace penstock::loader
