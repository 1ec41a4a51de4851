// SPDX-License-Identifier: Apache-2.0
// Messages of a pool's workers, as a trainer reads them. The size of the second part stands in front.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "wire/pool_record.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

constexpr size_t kPieceSizeBytes = 8;
constexpr size_t kKindAt = 6, kRecordBytesAt = 44, kPayloadBytesAt = 48, kOffsetAt = 56, kAnswerKindAt = 72,
                 kReservedAt = 74, kStateBytesAt = 76;

using Kind = wire::ToTrainer::Kind;

Bytes make(wire::PoolAnswer answer, uint64_t piece_bytes = 0) {
  answer.message.link = 1;
  answer.message.stamp = 2;
  answer.message.key = {1, 3};
  answer.worker_id = 5;
  answer.incarnation = 1;
  const Bytes part = wire::write_to_trainer(answer);
  Bytes bytes(kPieceSizeBytes);
  std::memcpy(bytes.data(), &piece_bytes, sizeof piece_bytes);
  bytes.insert(bytes.end(), part.begin(), part.end());
  return bytes;
}

bool has_text(Kind kind, wire::AnswerKind answer) {
  return kind == Kind::kRefused || kind == Kind::kDeclined || answer == wire::AnswerKind::kError;
}

}  // namespace

std::vector<Bytes> make_seeds() {
  const Bytes text(20, std::byte{'x'});
  const wire::PoolAnswer batch{
      .message = {.kind = Kind::kAnswer}, .kind = wire::AnswerKind::kBatch, .record_bytes = 30, .payload_bytes = 100};
  wire::PoolAnswer last = batch;
  last.payload_offset = 60;
  last.state = text;
  return {make({.message = {.kind = Kind::kWelcome}}),
          make({.message = {.kind = Kind::kRefused}, .body = text}),
          make({.message = {.kind = Kind::kDeclined}, .body = text}),
          make(batch, 100),
          make({.message = {.kind = Kind::kPiece}, .payload_bytes = 100}, 60),
          make(last, 40),
          make({.message = {.kind = Kind::kAnswer}, .kind = wire::AnswerKind::kEnd}),
          make({.message = {.kind = Kind::kAnswer}, .kind = wire::AnswerKind::kError, .body = text}),
          make({.message = {.kind = Kind::kAnswer}, .kind = wire::AnswerKind::kError, .body = text, .state = text})};
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < kPieceSizeBytes + wire::kPoolHeadBytes) bytes.resize(kPieceSizeBytes + wire::kPoolHeadBytes);
  std::byte* part = bytes.data() + kPieceSizeBytes;
  if (choices.mostly()) std::memcpy(part, &wire::kToTrainerMagic, sizeof wire::kToTrainerMagic);
  if (choices.mostly()) std::memcpy(part + 4, &wire::kPoolVersion, sizeof wire::kPoolVersion);
  const auto any_kind = static_cast<Kind>(1 + choices.below(static_cast<size_t>(Kind::kDeclined)));
  const Kind kind = choices.one_of({Kind::kAnswer, Kind::kPiece, any_kind, any_kind});
  const auto answer =
      kind == Kind::kAnswer ? static_cast<wire::AnswerKind>(1 + choices.below(3)) : wire::AnswerKind::kNone;
  const bool is_batch = answer == wire::AnswerKind::kBatch;
  if (choices.mostly()) part[kKindAt] = static_cast<std::byte>(kind);
  if (choices.mostly()) part[kKindAt + 1] &= std::byte{1};
  if (choices.mostly()) part[kAnswerKindAt] = static_cast<std::byte>(answer);
  if (choices.mostly()) part[kAnswerKindAt + 1] &= std::byte{wire::kDescriptorFlags};
  if (choices.mostly()) std::fill_n(part + kReservedAt, 2, std::byte{0});
  if (!is_batch && !has_text(kind, answer) && choices.mostly()) {
    bytes.resize(kPieceSizeBytes + wire::kPoolHeadBytes);
    part = bytes.data() + kPieceSizeBytes;
  }
  const auto body_bytes = static_cast<uint32_t>(bytes.size() - kPieceSizeBytes - wire::kPoolHeadBytes);
  auto state_bytes = is_batch ? body_bytes : 0;
  if (has_text(kind, answer) && choices.below(2) == 0)
    state_bytes = static_cast<uint32_t>(choices.below(body_bytes + 50));
  if (choices.mostly()) std::memcpy(part + kStateBytesAt, &state_bytes, sizeof state_bytes);
  // Some of it is above its cap, and some pieces lie outside of their batch.
  const bool has_piece = is_batch || kind == Kind::kPiece;
  const uint64_t payload_bytes = has_piece ? 1 + choices.below(wire::kPoolPayloadBytesMax + 50) : 0;
  const uint64_t offset = choices.below(payload_bytes + 1);
  uint64_t piece_bytes = has_piece ? 1 + choices.below(payload_bytes + 1) : 0;
  if (is_batch && choices.mostly()) piece_bytes = payload_bytes - offset;
  const auto record_bytes = static_cast<uint32_t>(choices.below(payload_bytes + 2));
  if (choices.mostly()) std::memcpy(part + kPayloadBytesAt, &payload_bytes, sizeof payload_bytes);
  if (choices.mostly()) std::memcpy(part + kOffsetAt, &offset, sizeof offset);
  if (choices.mostly()) std::memcpy(bytes.data(), &piece_bytes, sizeof piece_bytes);
  if (choices.mostly()) std::memcpy(part + kRecordBytesAt, &record_bytes, sizeof record_bytes);
}

void check(std::span<const std::byte> bytes) {
  if (bytes.size() < kPieceSizeBytes) return;
  uint64_t piece_bytes = 0;
  std::memcpy(&piece_bytes, bytes.data(), sizeof piece_bytes);
  const auto part = bytes.subspan(kPieceSizeBytes);
  const auto parsed = wire::parse_to_trainer(part, piece_bytes);
  if (!parsed) {
    expect(!parsed.error().message.empty(), "an error says what is wrong");
    return;
  }
  const wire::PoolAnswer& answer = parsed.value();
  touch(answer.body);
  touch(answer.state);
  const bool is_batch = answer.kind == wire::AnswerKind::kBatch;
  expect(is_batch || answer.kind == wire::AnswerKind::kError || answer.state.empty(),
         "only batches and errors have a state");
  expect(answer.body.empty() || has_text(answer.message.kind, answer.kind), "only errors and refusals have a text");
  expect((piece_bytes > 0) == (is_batch || answer.message.kind == Kind::kPiece), "only batches come in pieces");
  expect(answer.payload_bytes <= wire::kPoolPayloadBytesMax, "batches are capped");
  expect(piece_bytes <= wire::kPieceBytesMax, "pieces are capped");
  expect(answer.payload_offset <= answer.payload_bytes, "a piece begins in its batch");
  expect(piece_bytes <= answer.payload_bytes - answer.payload_offset, "a piece ends in its batch");
  expect(answer.record_bytes <= answer.payload_bytes, "a record lies in its payload");
  if (is_batch) {
    expect(answer.record_bytes > 0, "a batch has a record");
    expect(answer.payload_offset + piece_bytes == answer.payload_bytes, "a batch comes with its last piece");
  }
  expect(std::ranges::equal(wire::write_to_trainer(answer), part), "a message that is written again is the same bytes");
}

}  // namespace penstock::fuzz
