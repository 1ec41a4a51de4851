// SPDX-License-Identifier: Apache-2.0
#include "loader/incoming_batch.h"

#include <new>
#include <string>
#include <utility>

#include "wire/frame.h"
#include "wire/piece_record.h"

namespace penstock::loader {
namespace {

static_assert(wire::kElementBytesMax >= wire::kPoolPayloadBytesMax,
              "a batch without repeated elements must be accepted");

// Limits the expansion of a small message, for the whole batch: tensors may share bytes, as views do, may be narrow,
// and may repeat elements, and the values of a nest become objects.
Result<void> check_sizes(const Batch& batch, uint64_t payload_bytes) {
  if (batch.whole_bytes() / wire::kWholeFactorMax > payload_bytes) {
    return Fault{Errc::kTooLarge, "its tensors and values take " + std::to_string(batch.whole_bytes()) +
                                      " bytes and were received in " + std::to_string(payload_bytes) + "; at most " +
                                      std::to_string(wire::kWholeFactorMax) + " times as many are accepted"};
  }
  uint64_t elements = 0;
  for (const auto& entry : batch.frame().tensors) {
    if (entry.encoding == wire::Encoding::kWithheld) continue;  // has no memory here
    const uint64_t bytes = wire::element_bytes(entry);
    if (bytes <= wire::kElementBytesMax - elements) {
      elements += bytes;
      continue;
    }
    return Fault{Errc::kTooLarge,
                 "its tensors have elements of more than " + std::to_string(wire::kElementBytesMax) + " bytes"};
  }
  return {};
}

}  // namespace

IncomingBatch::IncomingBatch(BatchMemory& memory, uint64_t payload_bytes) : payload_bytes_(payload_bytes) {
  auto slab = memory.take_growing(payload_bytes);
  if (slab) slab_ = std::move(slab).value();
}

std::span<std::byte> IncomingBatch::room_for(uint64_t offset, uint64_t bytes) {
  if (offset != have_bytes_ || bytes > payload_bytes_ - have_bytes_) return {};
  if (slab_.lease && !BatchMemory::grow(slab_, offset + bytes)) move_to_heap();
  if (slab_.lease) return {slab_.lease->data() + offset, bytes};
  const uint64_t begin = has_no_room_ ? 0 : offset;
  try {
    heap_.resize(begin + bytes);
  } catch (const std::bad_alloc&) {
    has_no_room_ = true;
    heap_ = std::vector<std::byte>(bytes);
    return heap_;
  }
  return std::span(heap_).subspan(begin, bytes);
}

// Moves the bytes received so far.
void IncomingBatch::move_to_heap() {
  try {
    heap_.assign(slab_.lease->data(), slab_.lease->data() + have_bytes_);
  } catch (const std::bad_alloc&) {
    has_no_room_ = true;
  }
  slab_ = {};
}

Result<std::unique_ptr<Batch>> IncomingBatch::finish(wire::BatchFacts facts, uint32_t record_bytes, bool allow_pickle) {
  PENSTOCK_ASSERT(is_whole() && record_bytes <= payload_bytes_);
  if (has_no_room_) return no_memory();
  facts.record_bytes = record_bytes;
  facts.record_offset = payload_bytes_ - record_bytes;
  auto batch = take(facts, allow_pickle);
  if (!batch) return batch;
  if (batch.value()->frame().shared_file_count() > 0)
    return Fault{Errc::kMalformed, "a pool batch refers to shared memory"};
  if (auto checked = check_sizes(*batch.value(), payload_bytes_); !checked) return checked.error();
  return batch;
}

Fault IncomingBatch::no_memory() const {
  return {Errc::kNoMemory, "the trainer has insufficient memory for its " + std::to_string(payload_bytes_) +
                               " bytes; use smaller batches or fewer in flight (prefetch_factor, prefetch_bytes)"};
}

// A handed-over slab contains narrow tensors only if its batch was made for a network link before.
Result<std::unique_ptr<Batch>> IncomingBatch::take(const wire::BatchFacts& facts, bool allow_pickle) {
  if (!slab_.lease) return take_heap(facts, allow_pickle);
  const c10::intrusive_ptr<SlabLease> lease = is_shared_ ? slab_.lease : nullptr;
  auto batch = take_slab(facts, allow_pickle);
  if (!batch || !lease || !batch.value()->is_narrow()) return batch;
  try {
    heap_.assign(lease->data(), lease->data() + payload_bytes_);
  } catch (const std::bad_alloc&) {
    return no_memory();
  }
  return take_heap(facts, allow_pickle);
}

Result<std::unique_ptr<Batch>> IncomingBatch::take_slab(wire::BatchFacts facts, bool allow_pickle) {
  facts.slab_bytes = slab_.backed_bytes;
  facts.is_transient = slab_.is_transient;
  return Batch::from_slab(facts, std::move(slab_.lease), allow_pickle);
}

Result<std::unique_ptr<Batch>> IncomingBatch::take_heap(wire::BatchFacts facts, bool allow_pickle) {
  std::vector<std::byte> record(heap_.end() - facts.record_bytes, heap_.end());
  heap_.resize(facts.record_offset);
  return Batch::from_parts(facts, std::move(record), std::move(heap_), allow_pickle);
}

}  // namespace penstock::loader
