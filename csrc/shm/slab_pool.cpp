// SPDX-License-Identifier: Apache-2.0
#include "shm/slab_pool.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace penstock::shm {

namespace {

constexpr auto kReleaseWait = std::chrono::milliseconds(100);  // interval of checks whether the trainer still runs
constexpr uint64_t kTransientRoomBytes = 1 << 20;
constexpr uint64_t kTransientBytesMax = kArenaBytesMax / 2;
constexpr uint32_t kSpareSlabCount = 2;  // in addition to prefetch_factor: one being filled, one that the user holds

}  // namespace

uint32_t SlabPool::wanted_slab_count() const {
  return std::min(options_.prefetch_factor + kSpareSlabCount, kSlabCountMax);
}

Result<std::optional<SlabRegion>> SlabPool::try_acquire(uint64_t backed_bytes, uint32_t end) {
  const auto slab_index = arena_->try_acquire(end);
  if (!slab_index) return std::optional<SlabRegion>();
  if (auto reserved = arena_->reserve(*slab_index, backed_bytes); !reserved) {
    arena_->cancel(*slab_index);
    return reserved.error();
  }
  return std::optional(SlabRegion{.arena = arena_, .slab_index = *slab_index});
}

Result<SlabRegion> SlabPool::acquire(uint64_t bytes) {
  if (!options_.waits) return acquire_now(bytes);
  if (is_to_renew_.exchange(false)) arena_.reset();
  if (!arena_ || bytes > arena_->slab_bytes()) {
    if (bytes > options_.arena_bytes / 2) return make_transient(bytes, bytes);
    if (auto made = make_arena(bytes); !made) return made.error();
  }
  uint32_t end = end_of_begun();
  for (;;) {
    auto region = try_acquire(bytes, end);
    if (!region) return region.error();
    if (region.value()) return *std::move(region).value();
    if (end < arena_->slab_count()) {
      arena_->wait_for_release(options_.last_slab_wait, end);
      region = try_acquire(bytes, end);
      if (!region) return region.error();
      if (region.value()) return *std::move(region).value();
      end = arena_->slab_count();
      continue;
    }
    if (is_closing_.load()) return Fault{Errc::kClosed, "the trainer has ended"};
    if (is_worn_out()) {
      if (auto made = make_arena(bytes); !made) return made.error();
      continue;
    }
    arena_->wait_for_release(kReleaseWait);
  }
}

// The end of the slabs that are taken without a wait: excludes the last slab as long as it has no memory.
uint32_t SlabPool::end_of_begun() const {
  const uint32_t count = arena_->slab_count();
  return count > 2 && arena_->backed_bytes(count - 1) == 0 ? count - 1 : count;
}

// Slabs that the trainer's user holds across a fork are lost permanently; with half of them lost a new arena is due.
// The same holds if the dataset itself keeps so many that the user may hold all others: no slab would ever return.
bool SlabPool::is_worn_out() const {
  const uint32_t alive_count = arena_->alive_count();
  const uint32_t pinned_count = arena_->pinned_count();
  if (alive_count * 2 <= arena_->slab_count()) return true;
  return alive_count - std::min(pinned_count, alive_count) <= spare_slab_count(alive_count, options_.prefetch_factor);
}

Result<SlabRegion> SlabPool::acquire_now(uint64_t bytes, uint64_t backed_bytes) {
  if (is_to_renew_.exchange(false)) arena_.reset();
  if (bytes <= options_.arena_bytes / 2) {
    if (!arena_ || bytes > arena_->slab_bytes()) {
      if (auto made = make_arena(bytes); !made) return made.error();
    }
    auto region = try_acquire(backed_bytes);
    if (!region) return region.error();
    if (region.value()) return *std::move(region).value();
    if (!options_.waits && is_worn_out()) {
      if (auto made = make_arena(bytes); !made) return made.error();
      return acquire_now(bytes, backed_bytes);
    }
  }
  return make_transient(bytes, backed_bytes);
}

std::optional<SlabRegion> SlabPool::acquire_if_free(uint64_t bytes) {
  if (bytes > options_.arena_bytes / 2 || is_to_renew_.load()) return std::nullopt;
  if (!arena_ && !make_arena(bytes)) return std::nullopt;
  if (bytes > arena_->slab_bytes()) return std::nullopt;
  auto region = try_acquire(bytes, end_of_begun());
  return region ? std::move(region).value() : std::nullopt;
}

bool SlabPool::take_unannounced(const SlabRegion& region) {
  if (region.is_transient) return true;
  return std::exchange(announced_arena_id_, region.arena->id()) != region.arena->id();
}

Result<void> SlabPool::make_arena(uint64_t bytes) {
  uint64_t slab_count = wanted_slab_count();
  if (bytes > 0) slab_count = std::clamp<uint64_t>(options_.arena_bytes / bytes, 1, slab_count);
  auto made =
      Arena::create({.slab_bytes = options_.arena_bytes / slab_count, .slab_count = static_cast<uint32_t>(slab_count)},
                    next_arena_id_);
  if (!made) return made.error();
  ++next_arena_id_;
  arena_ = std::move(made).value();
  return {};
}

Result<SlabRegion> SlabPool::make_transient(uint64_t bytes, uint64_t backed_bytes) {
  // Twice the address space, which is free, so that the rest of the batch and its record fit behind the requested
  // bytes; otherwise every large batch would be copied to another arena when it is sealed.
  const uint64_t slab_bytes = std::max(bytes, std::min(2 * bytes + kTransientRoomBytes, kTransientBytesMax));
  auto made = Arena::create({.slab_bytes = slab_bytes, .slab_count = 1}, next_arena_id_);
  if (!made) return made.error();
  SlabRegion region{.arena = std::move(made).value(), .slab_index = 0, .is_transient = true};
  region.slab_index = *region.arena->try_acquire();
  if (auto reserved = region.arena->reserve(region.slab_index, backed_bytes); !reserved) return reserved.error();
  ++next_arena_id_;
  return region;
}

}  // namespace penstock::shm
