// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which leaves of a batch are handed over as the shared memory that they lie in already, in the place of a copy. As
// with torch's DataLoader, the trainer's tensor is then on the same memory as the dataset's, and each sees what the
// other writes.

#include <cstdint>

#include "worker/slab_writer.h"

namespace penstock::worker {

// Passing a descriptor takes about 15 us more than a batch does otherwise, and a copy of so many bytes 2 us: a row of a
// shared table is copied. Up to 1 MiB a copy is still a little faster (bench/shared_tensors.py), but torch's rules of
// aliasing are worth more than that.
constexpr uint64_t kSharedBytesMin = uint64_t{64} << 10;

// The leaves that lie in shared memory of torch's, of at least kSharedBytesMin each, and with them those that are on
// the same storage. Memory counts that torch passes by descriptor: share_memory_(), or what came through one of its
// queues. At most wire::kSharedFileCountMax storages, the first; what lies in others is copied.
SharedLeaves leaves_to_share(const BatchContent& content);

}  // namespace penstock::worker
