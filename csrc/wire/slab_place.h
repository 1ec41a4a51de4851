// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the bytes of a batch lie in memory that its worker has passed to the trainer.

#include <cstdint>

namespace penstock::wire {

struct SlabPlace {
  uint32_t arena_id = 0;
  uint32_t slab_index = 0;
  uint32_t generation = 0;
  bool is_transient = false;  // the arena is used once
  uint64_t slab_bytes = 0;    // of the slab that have memory

  friend bool operator==(const SlabPlace&, const SlabPlace&) = default;
};

}  // namespace penstock::wire
