// SPDX-License-Identifier: Apache-2.0
#pragma once
// The memory that a worker of this machine passes to its trainer, by descriptors over a Unix socket: arenas whose slabs
// hold its batches, and files in which tensors of a batch lie. The worker passes memory before it names it in a message
// on another socket, and a descriptor that was passed can be received at once, so nothing here waits.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/result.h"
#include "loader/arena_views.h"
#include "loader/counters.h"
#include "loader/slab_lease.h"
#include "shm/arena.h"
#include "shm/fd_channel.h"
#include "wire/slab_place.h"

namespace penstock::loader {

// Confined to the I/O thread.
class PassedMemory {
 public:
  // `views` and the counter of `arenas` outlive this, and are told of every arena. `file_count_max` bounds the files
  // that no batch has named yet.
  PassedMemory(shm::FdConnection connection, ArenaViews& views, Counter& arenas, size_t file_count_max)
      : connection_(std::move(connection)), views_(views), arena_count_(arenas), file_count_max_(file_count_max) {}

  shm::FdConnection& connection() { return connection_; }
  int fd() const { return connection_.fd(); }

  // Takes one thing that the worker has passed. kTimeout when nothing has come, kClosed when the worker hung up,
  // kMalformed for what no worker passes.
  Result<void> receive();

  // The right to read the slab in which a batch lies. kMalformed if there is none.
  Result<c10::intrusive_ptr<SlabLease>> lease(const wire::SlabPlace& place);
  // The files of a batch, in the order in which they were passed.
  Result<std::vector<FileDescriptor>> take_files(size_t count);
  // What was passed for batches that will not come.
  void drop_files() { files_.clear(); }

 private:
  Result<std::shared_ptr<shm::ArenaView>> find_arena(const wire::SlabPlace& place);

  shm::FdConnection connection_;
  ArenaViews& views_;
  Counter& arena_count_;
  const size_t file_count_max_;
  std::map<uint32_t, std::shared_ptr<shm::ArenaView>> arenas_;  // shared with the leases on their slabs
  std::deque<FileDescriptor> files_;
};

}  // namespace penstock::loader
