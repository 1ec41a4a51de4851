// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a process that makes batches sends a result to its parent in the chain (trainer or server): a batch by the name
// of its slab, with the descriptor of an arena that is new to the receiver, or after its message if it is not in a
// slab.

#include <span>

#include "base/result.h"
#include "shm/channel.h"
#include "shm/slab_pool.h"
#include "wire/job_record.h"

namespace penstock::worker {

// The location of a batch: in `region`, or in `payload` followed by `record`.
struct ResultBatch {
  const shm::SlabRegion* region = nullptr;
  std::span<const std::byte> payload = {};
  std::span<const std::byte> record = {};  // empty if `payload` ends with it
  std::span<const int> files = {};         // of its tensors in shared memory
};

// Sends a message without a batch. kClosed when the receiver is gone. Blocks until the socket has accepted it.
Result<void> send_message(shm::Channel& channel, const wire::FromJob& message);

// Sends a batch and fills in its location; the caller sets the sizes of record and payload. `slabs` contains the
// region. As send_message().
Result<void> send_batch(shm::Channel& channel, shm::SlabPool& slabs, wire::FromJob message, const ResultBatch& batch);

}  // namespace penstock::worker
