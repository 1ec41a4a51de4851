// SPDX-License-Identifier: Apache-2.0
#include "loader/pool_answers.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/hex.h"
#include "wire/frame.h"
#include "wire/nest.h"

namespace penstock::loader {

namespace {

constexpr size_t kQuotedSampleCountMax = 64;
constexpr size_t kSpokenEndBytesMax = 512;  // a sentence

std::string spoken_samples(wire::IndexKind kind, std::span<const std::byte> indices) {
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
    batch->set_state(answer.state);
    return batch;
  }
  if ((answer.flags & wire::kBatchRaises) != 0 && !reader.allow_pickle)
    return Fault{Errc::kMalformed, "it sent an exception as a batch, which would require unpickling"};
  auto batch = whole->finish(facts, answer.record_bytes, reader.allow_pickle);
  if (!batch) return batch;
  if (reader.is_python) {
    const wire::Frame& frame = batch.value()->frame();
    const auto leaves = std::span(frame.tensors).first(frame.leaf_count());
    if (auto checked = wire::check_python_values(frame.nest, leaves); !checked) return checked.error();
  }
  if (auto checked = batch.value()->check_narrow(); !checked) return checked.error();
  if (wire::is_recall(answer.message.key) && batch.value()->withheld_bytes() > 0)
    return Fault{Errc::kMalformed, "it omitted parts of a batch that was requested in full"};
  batch.value()->find_odd_bools();
  batch.value()->set_state(answer.state);
  return batch;
}

std::unique_ptr<Batch> error_of_damage(wire::BatchKey key, const std::string& place, const Fault& error) {
  return error_in_batch(key, place, "the batch cannot be read: " + error.message);
}

std::string spoken_size(uint64_t dataset_size) {
  if (dataset_size == wire::kSizeUntold) return "an unknown size";
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

std::string spoken_end(std::span<const std::byte> reason) {
  std::string text;
  for (const char c : text_of(reason.first(std::min(reason.size(), kSpokenEndBytesMax)))) {
    if (c >= ' ' && c <= '~') {
      text += c;
    } else {
      text += "\\x";
      append_hex(text, static_cast<uint8_t>(c));
    }
  }
  return text;
}

std::string spoken_deaths(wire::BatchKey key, const session::RequestContent& content, uint32_t death_count,
                          const DeathTraces& traces) {
  const std::string batch = wire::to_text(key) + spoken_samples(content.request.index_kind, content.indices);
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
      {.type_name = "RuntimeError", .text = spoken_deaths(key, content, death_count, traces), .worker = {}});
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
