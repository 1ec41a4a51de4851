// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where a worker gets memory for its next batch. One lasting arena, bounded by a cap, serves every batch that fits its
// slabs; when a batch does not fit, the arena is made again with fewer, larger slabs, and a batch for which not even
// two slabs fit under the cap gets an arena of its own that is used once.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "base/result.h"
#include "shm/arena.h"

namespace penstock::shm {

// A slab in use. Copyable; its owner sends or cancels it once.
struct SlabRegion {
  std::shared_ptr<Arena> arena;  // shared by the pool and by every tensor that the worker has on it
  uint32_t slab_index = 0;
  bool is_transient = false;

  std::byte* data() const { return arena->slab(slab_index); }
  uint64_t capacity() const { return arena->slab_bytes(); }
};

struct SlabPoolOptions {
  uint64_t arena_bytes = 0;  // cap of the lasting arena
  uint32_t prefetch_factor = 2;
  // Whether a batch for which no slab is free waits for one. Without it, it gets an arena of its own: where any worker
  // may be asked for the batch that the trainer waits for, all slabs may be with batches that come after it.
  bool waits = true;
  // How long a slab that was in use before is waited for, until the arena's last one is begun. Most loops need no more
  // than the others: only a loop that keeps a batch longer does, and then once.
  std::chrono::milliseconds last_slab_wait{20};
};

// Confined to the thread that serves requests, but for renew().
class SlabPool {
 public:
  // `is_closing` ends a wait for the trainer.
  SlabPool(const SlabPoolOptions& options, const std::atomic<bool>& is_closing)
      : options_(options), is_closing_(is_closing) {}

  // A slab for at least `bytes`; waits until one is free. Blocks. kClosed when the trainer is gone, kNoMemory when the
  // system has no memory for it.
  Result<SlabRegion> acquire(uint64_t bytes);

  // A slab for at least `bytes`, without waiting: where no slab is free the batch gets an arena of its own. A caller
  // that has a slab in hand already needs this, as it must not wait for a second one that the trainer's user may hold.
  Result<SlabRegion> acquire_now(uint64_t bytes) { return acquire_now(bytes, bytes); }
  // The same, of which the first `backed_bytes` alone have memory for sure: Arena::reserve() gives the rest of it some.
  Result<SlabRegion> acquire_now(uint64_t bytes, uint64_t backed_bytes);

  // The same in an arena of its own, so that a size that may be no batch's leaves the lasting arena as it is.
  Result<SlabRegion> acquire_apart(uint64_t bytes, uint64_t backed_bytes) {
    return make_transient(bytes, backed_bytes);
  }

  // A slab for at least `bytes` where acquire() would have it at once and need not make the arena again; else nothing.
  std::optional<SlabRegion> acquire_if_free(uint64_t bytes);

  // The next batch begins a new arena: slabs of this one may never come back. For any thread.
  void renew() { is_to_renew_.store(true); }

  // Whether the arena of `region` is new to the trainer; true once for each arena.
  bool take_unannounced(const SlabRegion& region);

 private:
  Result<std::optional<SlabRegion>> try_acquire(uint64_t backed_bytes, uint32_t end = kSlabCountMax);
  uint32_t end_of_begun() const;
  Result<void> make_arena(uint64_t bytes);
  Result<SlabRegion> make_transient(uint64_t bytes, uint64_t backed_bytes);
  uint32_t wanted_slab_count() const;
  bool is_worn_out() const;

  SlabPoolOptions options_;
  const std::atomic<bool>& is_closing_;
  std::atomic<bool> is_to_renew_{false};
  std::shared_ptr<Arena> arena_;
  uint32_t next_arena_id_ = 0;
  std::optional<uint32_t> announced_arena_id_;  // the lasting arena that the trainer knows
};

}  // namespace penstock::shm
