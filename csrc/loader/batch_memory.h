// SPDX-License-Identifier: Apache-2.0
#pragma once
// The trainer's slabs for batches from other hosts. They belong to an arena like a local worker's, so that leases,
// device copies and forks treat such a batch like any other.

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
  bool is_transient = false;                // in a single-use arena
  uint64_t backed_bytes = 0;                // bytes of the slab that have memory
  std::optional<shm::SlabRegion> region{};  // of a growing slab
};

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
