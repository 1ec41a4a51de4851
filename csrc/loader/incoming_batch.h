// SPDX-License-Identifier: Apache-2.0
#pragma once
// A batch from a pool worker while its chunks arrive, or in a slab that a worker on this machine has handed over.

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

// Confined to the receiving thread.
class IncomingBatch {
 public:
  // Receives into a slab of `memory` for the whole batch, or onto the heap. In either case memory is committed only for
  // bytes that arrive.
  IncomingBatch(BatchMemory& memory, uint64_t payload_bytes);

  // A complete batch, in a slab that a worker has handed over, and that the worker may still write to.
  IncomingBatch(LeasedSlab slab, uint64_t payload_bytes)
      : slab_(std::move(slab)), is_shared_(true), payload_bytes_(payload_bytes), have_bytes_(payload_bytes) {}

  // Returns the place for the next chunk, of `bytes` bytes; empty if the chunk at this offset is not the next one. The
  // written bytes count once add() was called. If there is no memory for the batch, the same place is reused for every
  // chunk.
  std::span<std::byte> room_for(uint64_t offset, uint64_t bytes);
  void add(uint64_t bytes) { have_bytes_ += bytes; }
  uint64_t payload_bytes() const { return payload_bytes_; }
  bool is_whole() const { return have_bytes_ == payload_bytes_; }

  // Returns the batch, whose record is the last `record_bytes` of the bytes received. `facts` identifies its request.
  // The bytes of narrow tensors lie in memory that no other process can write to, so that they cannot change between
  // check and widening.
  Result<std::unique_ptr<Batch>> finish(wire::BatchFacts facts, uint32_t record_bytes, bool allow_pickle);

 private:
  void move_to_heap();
  Fault no_memory() const;
  Result<std::unique_ptr<Batch>> take(const wire::BatchFacts& facts, bool allow_pickle);
  Result<std::unique_ptr<Batch>> take_slab(wire::BatchFacts facts, bool allow_pickle);
  Result<std::unique_ptr<Batch>> take_heap(wire::BatchFacts facts, bool allow_pickle);

  LeasedSlab slab_;
  bool is_shared_ = false;       // the slab is shared with the worker
  std::vector<std::byte> heap_;  // if there is no slab
  bool has_no_room_ = false;     // no memory on the heap either: the rest is dropped
  uint64_t payload_bytes_;
  uint64_t have_bytes_ = 0;
};

}  // namespace penstock::loader
