// SPDX-License-Identifier: Apache-2.0
#pragma once
// A batch of a pool's worker while its pieces arrive, or in the slab that a worker of this machine has handed over.

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "base/result.h"
#include "loader/batch.h"
#include "loader/batch_memory.h"
#include "wire/batch_facts.h"

namespace penstock::loader {

// Confined to the thread that receives.
class IncomingBatch {
 public:
  // With a slab of `memory` for the whole batch, or else on the heap. Either has memory for the bytes that arrive, and
  // not before them.
  IncomingBatch(BatchMemory& memory, uint64_t payload_bytes);

  // Whole, in a slab that a worker has handed over, and that it may still write to.
  IncomingBatch(LeasedSlab slab, uint64_t payload_bytes)
      : slab_(std::move(slab)), is_shared_(true), payload_bytes_(payload_bytes), have_bytes_(payload_bytes) {}

  // Where the next piece, of so many bytes, belongs. Nothing if the piece at this offset is not the one that follows.
  // What is written there counts once it was added. Without memory for the batch the room is used again and again.
  std::span<std::byte> room_for(uint64_t offset, uint64_t bytes);
  void add(uint64_t bytes) { have_bytes_ += bytes; }
  uint64_t payload_bytes() const { return payload_bytes_; }
  bool is_whole() const { return have_bytes_ == payload_bytes_; }

  // The batch, whose record is the last `record_bytes` of the bytes received. `facts` says whose it is. The bytes
  // of narrow tensors lie where no other process can write, so that those which are checked are those which are
  // widened.
  Result<std::unique_ptr<Batch>> finish(wire::BatchFacts facts, uint32_t record_bytes, bool allow_pickle);

 private:
  void move_to_heap();
  Fault no_memory() const;
  Result<std::unique_ptr<Batch>> take(const wire::BatchFacts& facts, bool allow_pickle);
  Result<std::unique_ptr<Batch>> take_slab(wire::BatchFacts facts, bool allow_pickle);
  Result<std::unique_ptr<Batch>> take_heap(wire::BatchFacts facts, bool allow_pickle);

  LeasedSlab slab_;
  bool is_shared_ = false;       // the slab, with the worker
  std::vector<std::byte> heap_;  // without a slab
  bool has_no_room_ = false;     // on the heap: the rest is dropped
  uint64_t payload_bytes_;
  uint64_t have_bytes_ = 0;
};

}  // namespace penstock::loader
