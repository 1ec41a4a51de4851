// SPDX-License-Identifier: Apache-2.0
#include "loader/incoming_batch.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "wire/frame.h"
#include "wire/nest.h"
#include "wire/pool_record.h"

namespace penstock::loader {
namespace {

static_assert(wire::kElementBytesMax >= wire::kPoolPayloadBytesMax,
              "a batch without repeated elements must be accepted");

// Limits the expansion of a small message, for the whole batch: tensors may share bytes, as views do, may be narrow,
// and may repeat elements, and the values of a nest become objects.
Result<void> check_sizes(const Batch& batch, uint64_t payload_bytes) {
  if (batch.record().whole_bytes() / wire::kWholeFactorMax > payload_bytes) {
    return Fault{Errc::kTooLarge, "its tensors and values take " + std::to_string(batch.record().whole_bytes()) +
                                      " bytes and were received in " + std::to_string(payload_bytes) + "; at most " +
                                      std::to_string(wire::kWholeFactorMax) + " times as many are accepted"};
  }
  uint64_t elements = 0;
  for (const auto& entry : batch.record().frame().tensors) {
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
  if (batch.value()->record().frame().shared_file_count() > 0)
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
  if (!batch || !lease || !batch.value()->record().is_narrow()) return batch;
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

namespace {

constexpr size_t kQuotedSampleCountMax = 64;
constexpr size_t kEndTextBytesMax = 512;  // a sentence

std::string format_samples(wire::IndexKind kind, std::span<const std::byte> indices) {
  if (kind != wire::IndexKind::kInteger && kind != wire::IndexKind::kIntegers) return "";
  const size_t count = indices.size() / sizeof(int64_t);
  std::string text = " (samples ";
  for (size_t place = 0; place < std::min(count, kQuotedSampleCountMax); ++place) {
    int64_t index = 0;
    std::memcpy(&index, indices.data() + place * sizeof index, sizeof index);
    text += (place > 0 ? ", " : "") + std::to_string(index);
  }
  if (count > kQuotedSampleCountMax) text += " and " + std::to_string(count - kQuotedSampleCountMax) + " more";
  return text + ")";
}

wire::BatchFacts facts_of(wire::BatchKey key) { return {.sequence = key.sequence, .epoch = key.epoch}; }

}  // namespace

std::string_view text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

Result<std::unique_ptr<Batch>> batch_of(const wire::PoolAnswer& answer, std::optional<IncomingBatch> whole,
                                        const std::string& worker, BatchReader reader) {
  wire::BatchFacts facts = facts_of(answer.message.key);
  facts.flags = answer.flags;
  facts.fetch_time = answer.fetch_time;
  facts.prefix_time = answer.prefix_time;
  facts.samples = answer.samples;
  if (!whole) {
    const std::string_view text = text_of(answer.body);
    const size_t end = std::min(text.find('\0'), text.size());
    auto batch = Batch::from_error(facts, {.type_name = std::string(text.substr(0, end)),
                                           .text = std::string(text.substr(std::min(end + 1, text.size()))),
                                           .worker = worker});
    batch->record().set_state(answer.state);
    return batch;
  }
  if ((answer.flags & wire::kBatchRaises) != 0 && !reader.allow_pickle)
    return Fault{Errc::kMalformed, "it sent an exception as a batch, which would require unpickling"};
  auto batch = whole->finish(facts, answer.record_bytes, reader.allow_pickle);
  if (!batch) return batch;
  if (reader.is_python) {
    const wire::Frame& frame = batch.value()->record().frame();
    const auto leaves = std::span(frame.tensors).first(frame.leaf_count());
    if (auto checked = wire::check_python_values(frame.nest, leaves); !checked) return checked.error();
  }
  if (auto checked = batch.value()->tensors().check_narrow(); !checked) return checked.error();
  if (wire::is_recall(answer.message.key) && batch.value()->record().withheld_bytes() > 0)
    return Fault{Errc::kMalformed, "it omitted parts of a batch that was requested in full"};
  batch.value()->tensors().find_nonstandard_bools();
  batch.value()->record().set_state(answer.state);
  batch.value()->record().set_sender(worker);
  return batch;
}

std::unique_ptr<Batch> error_of_damage(wire::BatchKey key, const std::string& place, const Fault& error) {
  return error_in_batch(key, place, "the batch cannot be read: " + error.message);
}

std::string format_dataset_size(uint64_t dataset_size) {
  if (dataset_size == wire::kSizeUnknown) return "an unknown size";
  if (dataset_size == wire::kNoSize) return "no length, because it is iterable";
  return std::to_string(dataset_size) + " samples";
}

std::unique_ptr<Batch> error_in_batch(wire::BatchKey key, const std::string& place, std::string text) {
  return Batch::from_error(facts_of(key),
                           {.type_name = "penstock.errors.PenstockError", .text = std::move(text), .worker = place});
}

std::unique_ptr<Batch> error_of_wrong_answers(wire::BatchKey key, const std::string& place, const std::string& reason,
                                              uint32_t count) {
  return error_in_batch(
      key, place,
      wire::to_text(key) + " was requested " + std::to_string(count) + " times and cannot be read: " + reason);
}

std::string format_end(std::span<const std::byte> reason) {
  std::string text;
  for (const char c : text_of(reason.first(std::min(reason.size(), kEndTextBytesMax)))) {
    if (c >= ' ' && c <= '~') {
      text += c;
    } else {
      text += "\\x";
      append_hex(text, static_cast<uint8_t>(c));
    }
  }
  return text;
}

std::string format_deaths(wire::BatchKey key, const session::RequestContent& content, uint32_t death_count,
                          const DeathTraces& traces) {
  const std::string batch = wire::to_text(key) + format_samples(content.request.index_kind, content.indices);
  std::string text = "1 worker died while making " + batch;
  if (death_count > 1) {
    text = std::to_string(death_count) + " workers in a row died while making " + batch +
           ", the last ones with no other batch to make";
  }
  if (!traces.lost_at.empty())
    text += std::string(death_count > 1 ? " (one of them at " : " (at ") + traces.lost_at + ")";
  if (!traces.last_end.empty()) text += (death_count > 1 ? "; the last of them " : "; it ") + traces.last_end;
  return text +
         "; check these samples for the cause (memory, a crash in native code, an exit): run the program with "
         "num_workers=0 and pool=\"\"";
}

std::unique_ptr<Batch> error_of_deaths(wire::BatchKey key, const session::RequestContent& content, uint32_t death_count,
                                       const DeathTraces& traces) {
  return Batch::from_error(
      facts_of(key),
      {.type_name = "RuntimeError", .text = format_deaths(key, content, death_count, traces), .worker = {}});
}

std::unique_ptr<Batch> error_of_indices(wire::BatchKey key, size_t index_bytes) {
  return Batch::from_error(
      facts_of(key),
      {.type_name = "ValueError",
       .text = "the indices of " + wire::to_text(key) + " are " + std::to_string(index_bytes) +
               " bytes, which exceeds the limit of a pool request; use smaller batches, or integer indices",
       .worker = {}});
}

}  // namespace penstock::loader
