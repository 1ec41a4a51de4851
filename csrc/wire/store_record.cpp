// SPDX-License-Identifier: Apache-2.0
#include "wire/store_record.h"

#include <algorithm>
#include <cstring>
#include <string_view>

namespace penstock::wire {
namespace {

constexpr uint8_t kForWakes = 1;
constexpr uint8_t kMayWait = 2;
constexpr uint8_t kAhead = 4;
constexpr uint8_t kDrawsNothing = 8;
constexpr uint8_t kCheap = 16;
constexpr uint8_t kToStoreFlags = kForWakes | kMayWait | kAhead | kDrawsNothing | kCheap;

// The facts of a batch; all zeros without one.
struct StoreBatchHead {
  uint64_t dataset_size = 0;
  uint64_t payload_bytes = 0;
  uint32_t record_bytes = 0;
  uint32_t sample_count = 0;
  uint32_t fetch_time = 0;
  uint32_t prefix_time = 0;
  SampleTimes samples{};
  uint8_t flags = 0;
  uint8_t cpu_share = 0;
  uint8_t reserved[6] = {};
};
static_assert(sizeof(StoreBatchHead) == 48);

struct ToStoreHead {
  uint32_t magic = kToStoreMagic;
  uint16_t version = kStoreVersion;
  uint8_t kind = 0;
  uint8_t flags = 0;
  uint64_t worker_id = 0;
  uint64_t trainer_id = 0;
  uint64_t number = 0;
  uint32_t group_bytes = 0;
  uint32_t sample_bytes = 0;
  uint32_t epoch_bytes = 0;
  uint32_t place_bytes = 0;
  uint8_t comparison = 0;
  uint8_t reserved[7] = {};
  uint64_t reserved_end[3] = {};
  StoreBatchHead batch{};
};
static_assert(sizeof(ToStoreHead) == kToStoreHeadBytes);

struct FromStoreHead {
  uint32_t magic = kFromStoreMagic;
  uint16_t version = kStoreVersion;
  uint8_t kind = 0;
  uint8_t is_sparse = 0;
  uint64_t number = 0;
  StoreNonce nonce{};
  StoreProof proof{};
  StoreBatchHead batch{};
};
static_assert(sizeof(FromStoreHead) == kFromStoreHeadBytes);

// A hello has its nonce and its proof in the place of a name.
constexpr size_t kStoreHelloBytes = sizeof(StoreNonce) + sizeof(StoreProof);

template <typename Head>
Result<Head> read_store_head(std::span<const std::byte> part, uint32_t magic, uint8_t kind_max,
                             std::string_view subject) {
  return read_head<Head>(part, {.magic = magic,
                                .version = kStoreVersion,
                                .kind_max = kind_max,
                                .subject = subject,
                                .hint = "all workers of a machine must use the same installation of penstock"});
}

StoreBatchHead head_of(const std::optional<StoreBatch>& batch) {
  if (!batch) return {};
  return {.dataset_size = batch->dataset_size,
          .payload_bytes = batch->payload_bytes,
          .record_bytes = batch->record_bytes,
          .sample_count = batch->sample_count,
          .fetch_time = batch->fetch_time,
          .prefix_time = batch->prefix_time,
          .samples = batch->samples,
          .flags = batch->flags,
          .cpu_share = batch->cpu_share};
}

// `payload` is what follows the message's other parts.
Result<std::optional<StoreBatch>> batch_of(const StoreBatchHead& head, bool has_batch,
                                           std::span<const std::byte> payload, std::string_view subject) {
  static constexpr StoreBatchHead kNone{};
  const bool is_none = std::memcmp(&head, &kNone, sizeof head) == 0;
  if (!has_batch) {
    if (!is_none || !payload.empty()) return malformed(subject, "it has a batch that its kind does not permit");
    return std::optional<StoreBatch>();
  }
  if (std::any_of(std::begin(head.reserved), std::end(head.reserved), [](uint8_t byte) { return byte != 0; }))
    return malformed(subject, "reserved bytes are not zero");
  if ((head.flags & ~kPoolAnswerFlags) != 0) return malformed(subject, "unknown flags");
  if (head.record_bytes == 0 || head.record_bytes > head.payload_bytes || head.payload_bytes > kPoolPayloadBytesMax)
    return malformed(subject, "the sizes of its batch are inconsistent");
  if (payload.size() != (head.payload_bytes <= kStoreInlineBytesMax ? head.payload_bytes : 0))
    return malformed(subject, "the length of its batch does not match its header");
  return std::optional(StoreBatch{.flags = head.flags,
                                  .cpu_share = head.cpu_share,
                                  .fetch_time = head.fetch_time,
                                  .prefix_time = head.prefix_time,
                                  .samples = head.samples,
                                  .sample_count = head.sample_count,
                                  .dataset_size = head.dataset_size,
                                  .record_bytes = head.record_bytes,
                                  .payload_bytes = head.payload_bytes,
                                  .payload = payload});
}

bool has_name(ToStore::Kind kind) {
  return kind == ToStore::Kind::kAsk || kind == ToStore::Kind::kAdmit || kind == ToStore::Kind::kRelease ||
         kind == ToStore::Kind::kRefuse;
}

bool has_batch(FromStore::Kind kind) { return kind == FromStore::Kind::kKept || kind == FromStore::Kind::kCompare; }

std::span<const std::byte> payload_of(const std::optional<StoreBatch>& batch) {
  return batch ? batch->payload : std::span<const std::byte>();
}

}  // namespace

std::vector<std::byte> write_to_store(const ToStore& message) {
  PENSTOCK_ASSERT(message.name.bytes() <= kStoreNameBytesMax, "the name is too long");
  const StoreName& name = message.name;
  const ToStoreHead head{
      .kind = static_cast<uint8_t>(message.kind),
      .flags = static_cast<uint8_t>((message.is_for_wakes ? kForWakes : 0) | (message.may_wait ? kMayWait : 0) |
                                    (message.is_ahead ? kAhead : 0) | (message.draws_nothing ? kDrawsNothing : 0) |
                                    (message.is_cheap ? kCheap : 0)),
      .worker_id = message.worker_id,
      .trainer_id = message.trainer_id,
      .number = message.number,
      .group_bytes = static_cast<uint32_t>(name.group.size()),
      .sample_bytes = static_cast<uint32_t>(name.samples.size()),
      .epoch_bytes = static_cast<uint32_t>(name.epoch.size()),
      .place_bytes = static_cast<uint32_t>(name.place.size()),
      .comparison = static_cast<uint8_t>(message.comparison),
      .batch = head_of(message.batch)};
  if (message.kind == ToStore::Kind::kHello) return message_of(head, {message.nonce, message.proof});
  return message_of(head, {name.group, name.samples, name.epoch, name.place, payload_of(message.batch)});
}

std::vector<std::byte> write_from_store(const FromStore& message) {
  const FromStoreHead head{.kind = static_cast<uint8_t>(message.kind),
                           .is_sparse = message.is_sparse,
                           .number = message.number,
                           .nonce = message.nonce,
                           .proof = message.proof,
                           .batch = head_of(message.batch)};
  return message_of(head, {payload_of(message.batch)});
}

Result<ToStore> parse_to_store(std::span<const std::byte> part) {
  constexpr std::string_view kSubject = "a question about kept batches";
  const auto read =
      read_store_head<ToStoreHead>(part, kToStoreMagic, static_cast<uint8_t>(ToStore::Kind::kCount), kSubject);
  if (!read) return read.error();
  const ToStoreHead& head = read.value();
  ToStore message{.kind = static_cast<ToStore::Kind>(head.kind),
                  .comparison = static_cast<ToStore::Comparison>(head.comparison),
                  .is_for_wakes = (head.flags & kForWakes) != 0,
                  .may_wait = (head.flags & kMayWait) != 0,
                  .is_ahead = (head.flags & kAhead) != 0,
                  .draws_nothing = (head.flags & kDrawsNothing) != 0,
                  .is_cheap = (head.flags & kCheap) != 0,
                  .worker_id = head.worker_id,
                  .trainer_id = head.trainer_id,
                  .number = head.number};
  const bool has_reserved =
      std::any_of(std::begin(head.reserved), std::end(head.reserved), [](uint8_t byte) { return byte != 0; }) ||
      std::any_of(std::begin(head.reserved_end), std::end(head.reserved_end), [](uint64_t word) { return word != 0; });
  if (has_reserved || (head.flags & ~kToStoreFlags) != 0 ||
      head.comparison > static_cast<uint8_t>(ToStore::Comparison::kUnclear))
    return malformed(kSubject, "a field is out of range");
  const uint64_t name_bytes = uint64_t{head.group_bytes} + head.sample_bytes + head.epoch_bytes + head.place_bytes;
  if (name_bytes > kStoreNameBytesMax || (!has_name(message.kind) && name_bytes != 0))
    return malformed(kSubject, "its name is too long, or its kind has none");
  auto body = part.subspan(sizeof head);
  if (body.size() < name_bytes) return malformed(kSubject, "it is shorter than the length in its header");
  if (message.kind == ToStore::Kind::kHello) {
    if (body.size() != kStoreHelloBytes) return malformed(kSubject, "its proof is missing");
    std::memcpy(message.nonce.data(), body.data(), sizeof message.nonce);
    std::memcpy(message.proof.data(), body.data() + sizeof message.nonce, sizeof message.proof);
    body = {};
  }
  const auto take = [&body](uint32_t bytes) {
    const auto taken = body.first(bytes);
    body = body.subspan(bytes);
    return taken;
  };
  message.name.group = take(head.group_bytes);
  message.name.samples = take(head.sample_bytes);
  message.name.epoch = take(head.epoch_bytes);
  message.name.place = take(head.place_bytes);
  auto batch = batch_of(head.batch, message.kind == ToStore::Kind::kSettle, body, kSubject);
  if (!batch) return batch.error();
  message.batch = batch.value();
  return message;
}

Result<FromStore> parse_from_store(std::span<const std::byte> part) {
  constexpr std::string_view kSubject = "an answer about kept batches";
  const auto read =
      read_store_head<FromStoreHead>(part, kFromStoreMagic, static_cast<uint8_t>(FromStore::Kind::kWake), kSubject);
  if (!read) return read.error();
  const FromStoreHead& head = read.value();
  if (head.is_sparse > 1) return malformed(kSubject, "a field is out of range");
  FromStore message{.kind = static_cast<FromStore::Kind>(head.kind),
                    .is_sparse = head.is_sparse == 1,
                    .number = head.number,
                    .nonce = head.nonce,
                    .proof = head.proof};
  auto batch = batch_of(head.batch, has_batch(message.kind), part.subspan(sizeof head), kSubject);
  if (!batch) return batch.error();
  message.batch = batch.value();
  return message;
}

}  // namespace penstock::wire
