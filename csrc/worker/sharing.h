// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which leaves of a batch are handed over in the shared memory that already contains them, instead of being copied. As
// with torch's DataLoader, the trainer's tensor then shares memory with the dataset's, and each sees the other's
// writes.

#include <cstdint>

#include "worker/slab_writer.h"

namespace penstock::worker {

// Passing a descriptor adds about 15 us to a batch, and copying this many bytes takes 2 us: a row of a shared table is
// copied. Up to 1 MiB a copy is still slightly faster (bench/shared_tensors.py), but torch's aliasing rules matter more
// than that.
constexpr uint64_t kSharedBytesMin = uint64_t{64} << 10;

// The leaves of at least kSharedBytesMin each that are in torch's shared memory, and the other leaves on the same
// storages. This covers memory that torch passes by descriptor: share_memory_(), or memory received through one of its
// queues. At most wire::kSharedFileCountMax storages, the first ones; leaves in others are copied.
SharedLeaves leaves_to_share(const BatchContent& content);

}  // namespace penstock::worker
