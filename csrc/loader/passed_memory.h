// SPDX-License-Identifier: Apache-2.0
#pragma once
// The memory that a worker of this machine passes to its trainer, by descriptors over a channel: arenas whose slabs
// hold its batches.

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
  // `views` and the counter of `arenas` outlive this, and are told of every arena.
  PassedMemory(ArenaViews& views, Counter& arenas) : views_(views), arena_count_(arenas) {}

  // Maps an arena. kMalformed for what is none, kNoMemory.
  Result<void> take_arena(uint32_t arena_id, const FileDescriptor& fd);
  bool has_arena(uint32_t arena_id) const { return arenas_.contains(arena_id); }

  // The right to read the slab in which a batch lies. kMalformed if there is none.
  Result<c10::intrusive_ptr<SlabLease>> lease(const wire::SlabPlace& place);

 private:
  ArenaViews& views_;
  Counter& arena_count_;
  std::map<uint32_t, std::shared_ptr<shm::ArenaView>> arenas_;  // shared with the leases on their slabs
};

// The same of a worker whose batches are named in messages on another connection (server/slab_handover.h). It passes an
// arena before it names it, and a descriptor that was passed can be received at once, so nothing here waits. Confined
// to the I/O thread.
class HandedOverMemory {
 public:
  HandedOverMemory(shm::Channel channel, ArenaViews& views, Counter& arenas)
      : channel_(std::move(channel)), memory_(views, arenas) {}

  // As PassedMemory::lease. kClosed when the worker hung up.
  Result<c10::intrusive_ptr<SlabLease>> lease(const wire::SlabPlace& place);

 private:
  Result<void> receive_arena();

  shm::Channel channel_;
  PassedMemory memory_;
};

}  // namespace penstock::loader
