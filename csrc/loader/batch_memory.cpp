// SPDX-License-Identifier: Apache-2.0
#include "loader/batch_memory.h"

#include <fcntl.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

#include "base/file_descriptor.h"

namespace penstock::loader {

Result<void> PassedMemory::take_arena(uint32_t arena_id, const FileDescriptor& fd) {
  auto view = shm::ArenaView::map(fd);
  if (!view) return view.error();
  arena_count_.add(1);
  arenas_.insert_or_assign(arena_id, view.value());
  views_.add(view.value());
  return {};
}

Result<c10::intrusive_ptr<SlabLease>> PassedMemory::lease(const wire::SlabPlace& place) {
  const auto found = arenas_.find(place.arena_id);
  if (found == arenas_.end())
    return Fault{Errc::kMalformed,
                 "a worker names arena " + std::to_string(place.arena_id) + ", which it has not passed"};
  const auto view = found->second;
  if (place.is_transient) {
    arenas_.erase(found);
  } else {  // lasting arenas are numbered upwards and used one at a time, so an older one is not named again
    arenas_.erase(arenas_.begin(), found);
  }
  if (place.slab_index >= view->slab_count()) {
    return Fault{Errc::kMalformed, "a worker names slab " + std::to_string(place.slab_index) + " of " +
                                       std::to_string(view->slab_count())};
  }
  view->populate(place.slab_index, place.slab_bytes);
  return c10::make_intrusive<SlabLease>(view, place.slab_index, place.generation);
}

Result<c10::intrusive_ptr<SlabLease>> HandedOverMemory::lease(const wire::SlabPlace& place) {
  while (!memory_.has_arena(place.arena_id)) {
    if (auto received = receive_arena(); !received) return received.error();
  }
  return memory_.lease(place);
}

Result<void> HandedOverMemory::receive_arena() {
  const auto message = channel_.receive(std::chrono::steady_clock::now());
  if (!message) return message.error();
  const auto arena = message.value().as<wire::HandoverArena>();
  if (!arena || message.value().fds.size() != 1)
    return Fault{Errc::kMalformed, "a worker sent a file descriptor that is not shared memory"};
  return memory_.take_arena(arena->arena_id, message.value().fds.front());
}

namespace {

constexpr uint32_t kSlabCountWanted = 64;       // while batches are small
constexpr uint64_t kUnseenBytes = 64ULL << 20;  // plausible size of a batch before the first one has arrived
constexpr uint64_t kLeap = 4;                   // times the largest batch so far

}  // namespace

BatchMemory::BatchMemory(uint64_t arena_bytes)
    : pool_({.arena_bytes = arena_bytes, .prefetch_factor = kSlabCountWanted}, is_closing_) {}

Result<LeasedSlab> BatchMemory::take(uint64_t bytes, uint64_t backed_bytes) {
  const bool is_likely = bytes <= std::max(kUnseenBytes, kLeap * largest_bytes_);
  if (!is_likely && backed_bytes > 0) {
    return Fault{Errc::kTooLarge, "a batch of " + std::to_string(bytes) + " bytes, but the largest so far has " +
                                      std::to_string(largest_bytes_)};
  }
  auto region = is_likely ? pool_.acquire_now(bytes, backed_bytes) : pool_.acquire_separate(bytes, backed_bytes);
  if (!region) return region.error();
  const shm::SlabRegion& slab = region.value();
  auto view = view_of(slab);
  if (!view) {
    slab.arena->cancel(slab.slab_index);
    return view.error();
  }
  if (backed_bytes > 0) view.value()->populate(slab.slab_index, slab.arena->backed_bytes(slab.slab_index));
  const uint32_t generation = slab.arena->generation(slab.slab_index);
  return LeasedSlab{.lease = c10::make_intrusive<SlabLease>(view.value(), slab.slab_index, generation),
                    .is_transient = slab.is_transient,
                    .backed_bytes = slab.arena->backed_bytes(slab.slab_index),
                    .region = slab};
}

Result<void> BatchMemory::grow(LeasedSlab& slab, uint64_t bytes) {
  shm::Arena& arena = *slab.region->arena;
  const uint32_t slab_index = slab.region->slab_index;
  if (auto reserved = arena.reserve(slab_index, bytes); !reserved) return reserved;
  slab.backed_bytes = arena.backed_bytes(slab_index);
  slab.lease->view().populate(slab_index, slab.backed_bytes);
  return {};
}

Result<std::shared_ptr<shm::ArenaView>> BatchMemory::view_of(const shm::SlabRegion& region) {
  if (view_ && !region.is_transient && region.arena->id() == arena_id_) return view_;
  const FileDescriptor descriptor(::fcntl(region.arena->fd(), F_DUPFD_CLOEXEC, 0));
  if (!descriptor) {
    return Fault{Errc::kNoMemory, std::string("mapping memory for batches failed: ") + std::strerror(errno) +
                                      "; raise the limit of open files (ulimit -n)"};
  }
  auto view = shm::ArenaView::map(descriptor);
  if (!view) return view;
  if (!region.is_transient) {
    view_ = view.value();
    arena_id_ = region.arena->id();
  }
  views_.add(view.value());
  return view;
}

}  // namespace penstock::loader
