// SPDX-License-Identifier: Apache-2.0
// Messages between the servers of one machine about kept batches, as either side reads them.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "wire/store_record.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

constexpr size_t kVersionAt = 4, kKindAt = 6, kGroupBytesAt = 32;
constexpr size_t kToBatchAt = 80, kFromBatchAt = 64;  // dataset's size, payload's bytes, record's bytes

bool is_to_store(std::span<const std::byte> bytes) {
  return bytes.size() >= sizeof kToStoreMagic && std::memcmp(bytes.data(), &kToStoreMagic, sizeof kToStoreMagic) == 0;
}

void check_batch(const std::optional<StoreBatch>& batch) {
  if (!batch) return;
  touch(batch->payload);
  expect(batch->record_bytes > 0 && batch->record_bytes <= batch->payload_bytes, "the record lies in its batch");
  expect(batch->payload.size() == (batch->payload_bytes <= kStoreInlineBytesMax ? batch->payload_bytes : 0),
         "a small batch is there, and a large one is not");
  expect((batch->flags & ~kPoolAnswerFlags) == 0, "flags are known");
}

}  // namespace

std::vector<Bytes> make_seeds() {
  const Bytes text(20, std::byte{'n'});
  const std::span<const std::byte> part(text);
  const StoreName name{
      .group = part.first(9), .samples = part.first(5), .epoch = part.first(4), .place = part.first(3)};
  const StoreBatch small{.record_bytes = 5, .payload_bytes = part.size(), .payload = part};
  const StoreBatch large{.sample_count = 4, .record_bytes = 5, .payload_bytes = kStoreInlineBytesMax + 1};
  return {
      write_to_store({.kind = ToStore::Kind::kHello, .number = 7, .nonce = {std::byte{1}}}),
      write_to_store({.kind = ToStore::Kind::kAsk, .may_wait = true, .worker_id = 1, .trainer_id = 2, .name = name}),
      write_to_store({.kind = ToStore::Kind::kAdmit,
                      .comparison = ToStore::Comparison::kUnclear,
                      .draws_nothing = true,
                      .number = 100,
                      .name = name}),
      write_to_store({.kind = ToStore::Kind::kSettle, .number = 3, .batch = small}),
      write_to_store({.kind = ToStore::Kind::kSettle, .number = 3, .batch = large}),
      write_from_store({.kind = FromStore::Kind::kAccepted, .proof = {std::byte{2}}}),
      write_from_store({.kind = FromStore::Kind::kKept, .is_sparse = true, .batch = small}),
      write_from_store({.kind = FromStore::Kind::kCompare, .batch = large})};
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  const bool is_to = choices.below(2) == 0;
  const size_t head_bytes = is_to ? kToStoreHeadBytes : kFromStoreHeadBytes;
  if (bytes.size() < head_bytes) bytes.resize(head_bytes);
  const uint32_t magic = is_to ? kToStoreMagic : kFromStoreMagic;
  if (choices.mostly()) std::memcpy(bytes.data(), &magic, sizeof magic);
  if (choices.mostly()) std::memcpy(bytes.data() + kVersionAt, &kStoreVersion, sizeof kStoreVersion);
  const auto kind_max =
      is_to ? static_cast<size_t>(ToStore::Kind::kCount) : static_cast<size_t>(FromStore::Kind::kWake);
  const size_t kind = 1 + choices.below(kind_max);
  if (choices.mostly()) bytes[kKindAt] = static_cast<std::byte>(kind);
  const bool has_name =
      is_to && (kind == static_cast<size_t>(ToStore::Kind::kAsk) || kind == static_cast<size_t>(ToStore::Kind::kAdmit));
  const bool has_batch = is_to ? kind == static_cast<size_t>(ToStore::Kind::kSettle)
                               : kind == static_cast<size_t>(FromStore::Kind::kKept) ||
                                     kind == static_cast<size_t>(FromStore::Kind::kCompare);
  size_t body_bytes = is_to && kind == 1 ? sizeof(StoreNonce) + sizeof(StoreProof) : 0;
  if (is_to && choices.mostly()) {
    uint32_t sizes[4] = {};
    for (uint32_t& size : sizes) {
      // Some names are above their cap.
      size = has_name ? static_cast<uint32_t>(choices.below(kStoreNameBytesMax / 3)) : 0;
      body_bytes += size;
    }
    std::memcpy(bytes.data() + kGroupBytesAt, sizes, sizeof sizes);
    std::fill_n(bytes.begin() + kGroupBytesAt + sizeof sizes + 1, 31, std::byte{0});
    bytes[kGroupBytesAt + sizeof sizes] = static_cast<std::byte>(choices.below(4));
    bytes[7] = static_cast<std::byte>(choices.below(16));
  }
  const size_t batch_at = is_to ? kToBatchAt : kFromBatchAt;
  if (!is_to) bytes[7] = std::byte{0};
  if (choices.mostly())
    std::fill(bytes.begin() + static_cast<ptrdiff_t>(batch_at), bytes.begin() + static_cast<ptrdiff_t>(head_bytes),
              std::byte{0});
  if (has_batch && choices.mostly()) {
    const uint64_t payload_bytes = 1 + choices.below(2 * kStoreInlineBytesMax);
    const auto record_bytes = static_cast<uint32_t>(1 + choices.below(payload_bytes + 1));
    std::memcpy(bytes.data() + batch_at + 8, &payload_bytes, sizeof payload_bytes);
    std::memcpy(bytes.data() + batch_at + 16, &record_bytes, sizeof record_bytes);
    if (payload_bytes <= kStoreInlineBytesMax) body_bytes += payload_bytes;
  }
  if (choices.mostly()) bytes.resize(head_bytes + body_bytes, std::byte{'x'});
}

bool check(std::span<const std::byte> bytes) {
  if (is_to_store(bytes)) {
    const auto parsed = parse_to_store(bytes);
    if (!parsed) return is_refused(parsed.error().message);
    const ToStore& message = parsed.value();
    for (const auto part : {message.name.group, message.name.samples, message.name.epoch, message.name.place})
      touch(part);
    expect(message.name.bytes() <= kStoreNameBytesMax, "names are capped");
    expect(message.kind >= ToStore::Kind::kHello && message.kind <= ToStore::Kind::kCount, "kinds are known");
    expect(message.comparison <= ToStore::Comparison::kUnclear, "comparisons are known");
    expect(message.batch.has_value() == (message.kind == ToStore::Kind::kSettle), "batches are those of their kind");
    check_batch(message.batch);
    expect(std::ranges::equal(write_to_store(message), bytes), "a message that is written again is the same");
    return true;
  }
  const auto parsed = parse_from_store(bytes);
  if (!parsed) return is_refused(parsed.error().message);
  check_batch(parsed.value().batch);
  expect(std::ranges::equal(write_from_store(parsed.value()), bytes), "a message that is written again is the same");
  return true;
}

}  // namespace penstock::fuzz
