// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a process that makes batches sends a result to the process above it: a batch by the name of its slab, with the
// descriptor of an arena that is new there, or behind its message where it lies in no slab.

#include <span>

#include "base/result.h"
#include "shm/channel.h"
#include "shm/slab_pool.h"
#include "wire/job_record.h"

namespace penstock::worker {

// Where a batch lies: in `region`, or in `payload` and then `record`.
struct ResultBatch {
  const shm::SlabRegion* region = nullptr;
  std::span<const std::byte> payload = {};
  std::span<const std::byte> record = {};  // empty where `payload` ends with it
  std::span<const int> files = {};         // of its tensors in shared memory
};

// Sends a message that is about no batch. kClosed when the process above is gone. Blocks until the socket has it.
Result<void> send_message(shm::Channel& channel, const wire::FromJob& message);

// Sends a batch, whose place is filled in here; the sizes of record and payload are the caller's. `slabs` has the
// region. As send_message().
Result<void> send_batch(shm::Channel& channel, shm::SlabPool& slabs, wire::FromJob message, const ResultBatch& batch);

}  // namespace penstock::worker
