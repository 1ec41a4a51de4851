// SPDX-License-Identifier: Apache-2.0
#pragma once
// The location of a batch's bytes in memory that its worker has passed to the trainer, and the two messages on the
// channel over which a pool worker passes such memory (server/slab_handover.h).

#include <cstdint>

namespace penstock::wire {

struct SlabPlace {
  uint32_t arena_id = 0;
  uint32_t slab_index = 0;
  uint32_t generation = 0;
  bool is_transient = false;  // the arena is used once
  uint64_t slab_bytes = 0;    // of the slab, backed by memory

  friend bool operator==(const SlabPlace&, const SlabPlace&) = default;
};

// The trainer's first and only message: the link on which it is about to greet the worker.
struct HandoverHello {
  uint64_t trainer_id = 0;
  uint32_t link = 0;
  uint32_t reserved = 0;

  friend bool operator==(const HandoverHello&, const HandoverHello&) = default;
};
static_assert(sizeof(HandoverHello) == 16);

// The worker's message about an arena, whose file descriptor is attached.
struct HandoverArena {
  uint32_t arena_id = 0;
};
static_assert(sizeof(HandoverArena) == 4);

}  // namespace penstock::wire
