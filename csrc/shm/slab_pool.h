// SPDX-License-Identifier: Apache-2.0
#pragma once
// Allocates memory for a worker's next batch. One lasting arena, bounded by a cap, serves every batch that fits its
// slabs. If a batch does not fit, the arena is replaced by one with fewer, larger slabs; a batch so large that not even
// two slabs fit under the cap gets a separate arena that is used once.

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
  // Whether acquire() waits if no slab is free. If not, the batch gets a separate arena: if the trainer may ask any
  // worker for the batch that it is waiting for, all slabs may hold later batches.
  bool waits = true;
  // How long to wait for a slab that was in use before, instead of starting to use the arena's last slab. Most loops
  // never need the last one; a loop that keeps a batch for longer does, and waits only once.
  std::chrono::milliseconds last_slab_wait{20};
};

// Confined to the thread that serves requests, except renew().
class SlabPool {
 public:
  // `is_closing` ends a wait for the trainer.
  SlabPool(const SlabPoolOptions& options, const std::atomic<bool>& is_closing)
      : options_(options), is_closing_(is_closing) {}

  // Returns a slab for at least `bytes`; waits until one is free. Blocks. kClosed if the trainer is gone, kNoMemory if
  // the system has no memory for it.
  Result<SlabRegion> acquire(uint64_t bytes);

  // Returns a slab for at least `bytes` without waiting: if no slab is free, the batch gets a separate arena. A caller
  // that already has a slab needs this, as it must not wait for a second one that the trainer's user may hold.
  Result<SlabRegion> acquire_now(uint64_t bytes) { return acquire_now(bytes, bytes); }
  // The same, but only the first `backed_bytes` are backed by memory; Arena::reserve() backs the rest.
  Result<SlabRegion> acquire_now(uint64_t bytes, uint64_t backed_bytes);

  // The same in a separate arena, so that a size that may not belong to a batch leaves the lasting arena unchanged.
  Result<SlabRegion> acquire_separate(uint64_t bytes, uint64_t backed_bytes) {
    return make_transient(bytes, backed_bytes);
  }

  // Returns a slab for at least `bytes` if acquire() would return one immediately from the present arena; otherwise
  // none.
  std::optional<SlabRegion> acquire_if_free(uint64_t bytes);

  // Makes the next batch start a new arena, because slabs of this one may never return. May be called on any thread.
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
