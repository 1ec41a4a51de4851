// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the answer of a pool worker becomes a batch. IncomingBatch assembles the bytes; batch_of() returns the result of
// a request: the batch, or the error that a worker sent in its place. The other functions make the errors that the
// trainer finds, and describe them to the user.

#include <c10/util/intrusive_ptr.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "loader/batch.h"
#include "loader/batch_memory.h"
#include "session/request_order.h"
#include "wire/message.h"
#include "wire/pool_record.h"

namespace penstock::loader {

// A batch from a pool worker while its chunks arrive, or in a slab that a worker on this machine has handed over.
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

std::string_view text_of(std::span<const std::byte> bytes);

// The reader of a pool's batches.
struct BatchReader {
  bool allow_pickle = false;
  bool is_python = false;
};

// The batch of an answer whose bytes have all arrived, or of an error answer. `worker` is the sender's name in
// messages. kMalformed and kTooLarge if it does not answer its request, kNoMemory if the trainer has no memory.
Result<std::unique_ptr<Batch>> batch_of(const wire::PoolAnswer& answer, std::optional<IncomingBatch> whole,
                                        const std::string& worker, BatchReader reader);

// The error in place of a batch from `place` that cannot be read here, usually for lack of memory.
std::unique_ptr<Batch> error_of_damage(wire::BatchKey key, const std::string& place, const Fault& error);

// Formats a dataset's size as reported by a worker: "40 samples".
std::string format_dataset_size(uint64_t dataset_size);

// The error in place of a batch from `place`.
std::unique_ptr<Batch> error_in_batch(wire::BatchKey key, const std::string& place, std::string text);

// The error in place of a batch after `count` wrong answers, the last one from `place`.
std::unique_ptr<Batch> error_of_wrong_answers(wire::BatchKey key, const std::string& place, const std::string& reason,
                                              uint32_t count);

// A worker's description of how one of its processes ended, sanitised for a terminal.
std::string format_end(std::span<const std::byte> reason);

// The known facts about workers that died while they made a batch.
struct DeathTraces {
  std::string lost_at{};   // the endpoint of one of them, or empty
  std::string last_end{};  // how the process ended, from format_end(), of the last worker that reported it; or empty
};

// Describes that one worker after another died while making a batch.
std::string format_deaths(wire::BatchKey key, const session::RequestContent& content, uint32_t death_count,
                          const DeathTraces& traces);
// The error in the batch's place.
std::unique_ptr<Batch> error_of_deaths(wire::BatchKey key, const session::RequestContent& content, uint32_t death_count,
                                       const DeathTraces& traces);

// The error in place of a batch whose indices exceed the size limit of a request.
std::unique_ptr<Batch> error_of_indices(wire::BatchKey key, size_t index_bytes);

}  // namespace penstock::loader
