// SPDX-License-Identifier: Apache-2.0
#pragma once
// The memory that a worker on this machine passes to its trainer, as descriptors over a channel: arenas whose slabs
// contain its batches.

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "base/file_descriptor.h"
#include "base/result.h"
#include "loader/arena_views.h"
#include "loader/counters.h"
#include "loader/slab_lease.h"
#include "shm/arena.h"
#include "shm/channel.h"
#include "wire/slab_place.h"

namespace penstock::loader {

// Confined to the I/O thread.
class PassedMemory {
 public:
  // `views` and the counter `arenas` outlive this; both record every arena.
  PassedMemory(ArenaViews& views, Counter& arenas) : views_(views), arena_count_(arenas) {}

  // Maps an arena. kMalformed if the file is not an arena, kNoMemory.
  Result<void> take_arena(uint32_t arena_id, const FileDescriptor& fd);
  bool has_arena(uint32_t arena_id) const { return arenas_.contains(arena_id); }

  // Returns the right to read a batch's slab. kMalformed if there is no such slab.
  Result<c10::intrusive_ptr<SlabLease>> lease(const wire::SlabPlace& place);

 private:
  ArenaViews& views_;
  Counter& arena_count_;
  std::map<uint32_t, std::shared_ptr<shm::ArenaView>> arenas_;  // shared with the leases on their slabs
};

// The same for a worker whose batches are named in messages on another connection (server/slab_handover.h). The worker
// passes an arena before it names it, and a passed descriptor can be received immediately, so no call waits. Confined
// to the I/O thread.
class HandedOverMemory {
 public:
  HandedOverMemory(shm::Channel channel, ArenaViews& views, Counter& arenas)
      : channel_(std::move(channel)), memory_(views, arenas) {}

  // As PassedMemory::lease. kClosed if the worker closed the channel.
  Result<c10::intrusive_ptr<SlabLease>> lease(const wire::SlabPlace& place);

 private:
  Result<void> receive_arena();

  shm::Channel channel_;
  PassedMemory memory_;
};

}  // namespace penstock::loader
