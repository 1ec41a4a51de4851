// SPDX-License-Identifier: Apache-2.0
#include "loader/passed_memory.h"

#include <chrono>
#include <string>

namespace penstock::loader {

Result<void> PassedMemory::receive() {
  auto received = connection_.receive(std::chrono::steady_clock::now());
  if (!received) return received.error();
  const shm::FdMessage& message = received.value().message;
  const bool is_file = message.kind == shm::kFdFile;
  if (!is_file && message.kind != shm::kFdArena)
    return Fault{Errc::kMalformed, "a worker sent something other than memory on its descriptor socket"};
  if (!received.value().fd) return Fault{Errc::kMalformed, "a worker passed memory without its descriptor"};
  if (is_file) {
    if (files_.size() >= file_count_max_)
      return Fault{Errc::kTooLarge, "a worker passed " + std::to_string(files_.size()) +
                                        " files in shared memory that no batch of its lies in"};
    files_.push_back(std::move(received.value().fd));
    return {};
  }
  auto view = shm::ArenaView::map(received.value().fd);
  if (!view) return view.error();
  arena_count_.add(1);
  arenas_.insert_or_assign(message.arena_id, view.value());
  views_.add(view.value());
  return {};
}

Result<std::shared_ptr<shm::ArenaView>> PassedMemory::find_arena(const wire::SlabPlace& place) {
  while (!arenas_.contains(place.arena_id)) {
    if (auto received = receive(); !received) return received.error();
  }
  auto view = arenas_.at(place.arena_id);
  // Lasting arenas are numbered upwards and used one at a time, so an older one is not named again.
  if (!place.is_transient) arenas_.erase(arenas_.begin(), arenas_.find(place.arena_id));
  return view;
}

Result<c10::intrusive_ptr<SlabLease>> PassedMemory::lease(const wire::SlabPlace& place) {
  auto view = find_arena(place);
  if (!view) return view.error();
  if (place.is_transient) arenas_.erase(place.arena_id);
  if (place.slab_index >= view.value()->slab_count()) {
    return Fault{Errc::kMalformed, "a worker names slab " + std::to_string(place.slab_index) + " of " +
                                       std::to_string(view.value()->slab_count())};
  }
  view.value()->populate(place.slab_index, place.slab_bytes);
  return c10::make_intrusive<SlabLease>(view.value(), place.slab_index, place.generation);
}

Result<std::vector<FileDescriptor>> PassedMemory::take_files(size_t count) {
  while (files_.size() < count) {
    if (auto received = receive(); !received) return received.error();
  }
  std::vector<FileDescriptor> files;
  for (size_t index = 0; index < count; ++index) {
    files.push_back(std::move(files_.front()));
    files_.pop_front();
  }
  return files;
}

}  // namespace penstock::loader
