// SPDX-License-Identifier: Apache-2.0
// Messages of a pool's workers, as a trainer reads them.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "wire/pool_record.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

constexpr size_t kKindAt = 6, kRecordBytesAt = 44, kPayloadBytesAt = 48, kStateBytesAt = 64, kAnswerKindAt = 68,
                 kReservedAt = 71, kSampleCountAt = 96, kZeroAt = 108;
// Behind the head of a batch in a slab: its place there.
constexpr size_t kPlaceBytes = 24, kTransientAt = wire::kToTrainerHeadBytes + 12;
// Behind the head of a welcome: the cipher, the nonce and the digests of its kernels, and then the endpoint.
constexpr size_t kGrantBytesLeast = 1 + wire::kSealNonceBytes + sizeof(Numerics);

using Kind = wire::ToTrainer::Kind;

Bytes make(wire::PoolAnswer answer) {
  answer.message.link = 1;
  answer.message.stamp = 2;
  answer.message.key = {1, 3};
  answer.worker_id = 5;
  answer.incarnation = 1;
  return wire::write_to_trainer(answer);
}

bool has_text(Kind kind, wire::AnswerKind answer) {
  return kind == Kind::kRefused || kind == Kind::kDeclined || kind == Kind::kDied || answer == wire::AnswerKind::kError;
}

}  // namespace

std::vector<Bytes> make_seeds() {
  const Bytes text(20, std::byte{'x'});
  const wire::PoolAnswer batch{
      .message = {.kind = Kind::kAnswer}, .kind = wire::AnswerKind::kBatch, .record_bytes = 30, .payload_bytes = 100};
  wire::PoolAnswer with_state = batch;
  with_state.state = text;
  wire::PoolAnswer in_slab = with_state;
  in_slab.place = {.arena_id = 1, .slab_index = 2, .generation = 3, .slab_bytes = 4096};
  const wire::SealGrant grant{.nonce = {std::byte{1}}, .data_endpoint = "tcp://a:1"};
  return {make({.message = {.kind = Kind::kWelcome}, .grant = grant}),
          make({.message = {.kind = Kind::kRefused}, .body = text}),
          make({.message = {.kind = Kind::kDeclined}, .body = text}),
          make({.message = {.kind = Kind::kDied}, .body = text}),
          make({.message = {.kind = Kind::kPong}}),
          make(batch),
          make(with_state),
          make(in_slab),
          make({.message = {.kind = Kind::kAnswer}, .kind = wire::AnswerKind::kEnd}),
          make({.message = {.kind = Kind::kAnswer}, .kind = wire::AnswerKind::kError, .body = text}),
          make({.message = {.kind = Kind::kAnswer}, .kind = wire::AnswerKind::kError, .body = text, .state = text})};
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < wire::kToTrainerHeadBytes) bytes.resize(wire::kToTrainerHeadBytes);
  if (choices.mostly()) std::memcpy(bytes.data(), &wire::kToTrainerMagic, sizeof wire::kToTrainerMagic);
  if (choices.mostly()) std::memcpy(bytes.data() + 4, &wire::kPoolVersion, sizeof wire::kPoolVersion);
  const auto any_kind = static_cast<Kind>(1 + choices.below(static_cast<size_t>(Kind::kDied)));
  const Kind kind = choices.one_of({Kind::kAnswer, Kind::kWelcome, any_kind, any_kind});
  const auto answer =
      kind == Kind::kAnswer ? static_cast<wire::AnswerKind>(1 + choices.below(3)) : wire::AnswerKind::kNone;
  const bool is_batch = answer == wire::AnswerKind::kBatch;
  if (choices.mostly()) bytes[kKindAt] = static_cast<std::byte>(kind);
  const bool is_in_slab = is_batch && choices.below(3) == 0;
  if (choices.mostly()) bytes[kKindAt + 1] &= std::byte{1};
  if (is_in_slab) bytes[kKindAt + 1] |= std::byte{2};
  if (is_in_slab && choices.mostly() && bytes.size() < wire::kToTrainerHeadBytes + kPlaceBytes)
    bytes.resize(wire::kToTrainerHeadBytes + kPlaceBytes);
  if (is_in_slab && choices.mostly() && bytes.size() >= wire::kToTrainerHeadBytes + kPlaceBytes)
    std::fill_n(bytes.begin() + kTransientAt + 1, 3, std::byte{0});
  if (choices.mostly()) bytes[kAnswerKindAt] = static_cast<std::byte>(answer);
  if (choices.mostly()) bytes[kAnswerKindAt + 1] &= std::byte{wire::kPoolAnswerFlags};
  if (choices.mostly()) bytes[kReservedAt] = std::byte{0};
  if (choices.mostly()) std::fill_n(bytes.begin() + kZeroAt, 4, std::byte{0});
  if (!is_batch && choices.mostly()) std::fill_n(bytes.begin() + kSampleCountAt, 4, std::byte{0});
  if (kind == Kind::kWelcome && choices.mostly()) {
    // Some endpoints are above their cap, and some are empty.
    bytes.resize(wire::kToTrainerHeadBytes + kGrantBytesLeast + choices.below(wire::kDataEndpointBytesMax + 3));
    bytes[wire::kToTrainerHeadBytes] = std::byte(choices.below(4));
  } else if (!is_batch && !has_text(kind, answer) && choices.mostly()) {
    bytes.resize(wire::kToTrainerHeadBytes);
  }
  const auto body_bytes = static_cast<uint32_t>(bytes.size() - wire::kToTrainerHeadBytes);
  auto state_bytes = is_batch ? body_bytes : 0;
  if (is_in_slab) state_bytes -= std::min<uint32_t>(state_bytes, kPlaceBytes);
  if (has_text(kind, answer) && choices.below(2) == 0)
    state_bytes = static_cast<uint32_t>(choices.below(body_bytes + 50));
  if (choices.mostly()) std::memcpy(bytes.data() + kStateBytesAt, &state_bytes, sizeof state_bytes);
  // Some of it is above its cap.
  const uint64_t payload_bytes = is_batch ? 1 + choices.below(wire::kPoolPayloadBytesMax + 50) : 0;
  const auto record_bytes = static_cast<uint32_t>(choices.below(payload_bytes + 2));
  if (choices.mostly()) std::memcpy(bytes.data() + kPayloadBytesAt, &payload_bytes, sizeof payload_bytes);
  if (choices.mostly()) std::memcpy(bytes.data() + kRecordBytesAt, &record_bytes, sizeof record_bytes);
}

bool check(std::span<const std::byte> bytes) {
  const auto parsed = wire::parse_to_trainer(bytes);
  if (!parsed) return is_refused(parsed.error().message);
  const wire::PoolAnswer& answer = parsed.value();
  touch(answer.body);
  touch(answer.state);
  const bool is_batch = answer.kind == wire::AnswerKind::kBatch;
  expect(is_batch || answer.kind == wire::AnswerKind::kError || answer.state.empty(),
         "only batches and errors have a state");
  expect(!answer.place || is_batch, "only batches lie in a slab");
  expect(answer.body.empty() || has_text(answer.message.kind, answer.kind),
         "only errors, refusals and deaths have a text");
  expect(answer.payload_bytes <= wire::kPoolPayloadBytesMax, "batches are capped");
  expect(is_batch || answer.payload_bytes == 0, "only batches have a payload");
  expect(answer.record_bytes <= answer.payload_bytes, "a record lies in its payload");
  if (is_batch) expect(answer.record_bytes > 0, "a batch has a record");
  expect(is_batch || answer.sample_count == 0, "only batches have samples");
  expect(answer.grant.has_value() == (answer.message.kind == Kind::kWelcome), "welcomes grant keys");
  if (answer.grant) {
    const size_t size = answer.grant->data_endpoint.size();
    expect(size > 0 && size <= wire::kDataEndpointBytesMax, "endpoints are there and capped");
  }
  expect(std::ranges::equal(wire::write_to_trainer(answer), bytes),
         "a message that is written again is the same bytes");
  return true;
}

}  // namespace penstock::fuzz
