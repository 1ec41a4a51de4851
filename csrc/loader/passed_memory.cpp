// SPDX-License-Identifier: Apache-2.0
#include "loader/passed_memory.h"

#include <chrono>
#include <string>

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

}  // namespace penstock::loader
