// SPDX-License-Identifier: Apache-2.0
#pragma once
// Slabs of the trainer's own, which batches from other hosts are received into. They are those of an arena like a
// local worker's, so that leases, device copies and forks treat such a batch like any other.

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "base/result.h"
#include "loader/arena_views.h"
#include "loader/slab_lease.h"
#include "shm/slab_pool.h"

namespace penstock::loader {

struct LeasedSlab {
  c10::intrusive_ptr<SlabLease> lease;
  bool is_transient = false;  // of an arena that is used once
  uint64_t backed_bytes = 0;  // of the slab that have memory
};

// Confined to the thread that receives, but for retire_held(), which any may call.
class BatchMemory {
 public:
  explicit BatchMemory(uint64_t arena_bytes);

  // A slab of at least `bytes`, the size that a worker claims for a batch. Never waits: a batch that does not fit the
  // arena while the user holds much of it gets memory of its own. Errors: kNoMemory when the system has none; kTooLarge
  // when the batches so far make such a size unlikely, so that the worker has to send the bytes before memory is set
  // aside for them.
  Result<LeasedSlab> take(uint64_t bytes);

  // A batch of this size has come.
  void note_received(uint64_t bytes) { largest_bytes_ = std::max(largest_bytes_, bytes); }
  // The bytes of the largest batch that came.
  uint64_t largest_bytes() const { return largest_bytes_; }

  void retire_held() { views_.retire_held(); }

 private:
  Result<std::shared_ptr<shm::ArenaView>> view_of(const shm::SlabRegion& region);

  uint64_t largest_bytes_ = 0;
  std::atomic<bool> is_closing_{false};
  shm::SlabPool pool_;
  uint32_t arena_id_ = 0;  // that view_ is of
  std::shared_ptr<shm::ArenaView> view_;
  ArenaViews views_;
};

}  // namespace penstock::loader
