// SPDX-License-Identifier: Apache-2.0
#pragma once
// Slabs of the trainer's own, which batches from other hosts are received into. They are those of an arena like a
// local worker's, so that leases, device copies and forks treat such a batch like any other.

#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/result.h"
#include "loader/arena_views.h"
#include "loader/slab_lease.h"
#include "shm/slab_pool.h"

namespace penstock::loader {

struct LeasedSlab {
  c10::intrusive_ptr<SlabLease> lease;
  bool is_transient = false;                // of an arena that is used once
  uint64_t backed_bytes = 0;                // of the slab that have memory
  std::optional<shm::SlabRegion> region{};  // of a slab that grows
};

// Confined to the thread that receives, but for retire_held(), which any may call.
class BatchMemory {
 public:
  explicit BatchMemory(uint64_t arena_bytes);

  // A slab of at least `bytes`, a size that follows from what a worker claims. Never waits: a batch that does not fit
  // the arena while the user holds much of it gets memory of its own. Errors: kNoMemory when the system has none;
  // kTooLarge when the batches so far make such a size unlikely.
  Result<LeasedSlab> take(uint64_t bytes) { return take(bytes, bytes); }
  // The same of any size and without memory, for one that fills it piece by piece and calls grow() first. So what a
  // worker claims costs addresses alone until its bytes come; and memory for a batch of gigabytes takes the system
  // longer to find than a thread that answers leases may be away.
  Result<LeasedSlab> take_growing(uint64_t bytes) { return take(bytes, 0); }
  // Gives the first `bytes` of a growing slab memory. kNoMemory.
  static Result<void> grow(LeasedSlab& slab, uint64_t bytes);

  // A batch of this size has come.
  void note_received(uint64_t bytes) { largest_bytes_ = std::max(largest_bytes_, bytes); }
  // The bytes of the largest batch that came.
  uint64_t largest_bytes() const { return largest_bytes_; }

  void retire_held() { views_.retire_held(); }

 private:
  Result<LeasedSlab> take(uint64_t bytes, uint64_t backed_bytes);
  Result<std::shared_ptr<shm::ArenaView>> view_of(const shm::SlabRegion& region);

  uint64_t largest_bytes_ = 0;
  std::atomic<bool> is_closing_{false};
  shm::SlabPool pool_;
  uint32_t arena_id_ = 0;  // that view_ is of
  std::shared_ptr<shm::ArenaView> view_;
  ArenaViews views_;
};

}  // namespace penstock::loader
