// SPDX-License-Identifier: Apache-2.0
// Messages of a pool's workers, as a trainer reads them. The size of the second part, of a piece, stands in front.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "transport/pool_record.h"

namespace penstock::fuzz {

using namespace penstock::transport;

namespace {

constexpr size_t kPieceSizeBytes = 8;
constexpr size_t kKindAt = 6, kBodyBytesAt = 44, kPayloadBytesAt = 48, kOffsetAt = 56, kAnswerKindAt = 72;
constexpr uint8_t kAnswer = 5, kPiece = 9;

Bytes make(cluster::ToTrainer::Kind kind, AnswerKind answer, uint64_t piece_bytes, size_t body_bytes) {
  const Bytes body(body_bytes, std::byte{1});
  const Bytes part = write_to_trainer({.message = {.kind = kind, .link = 1, .stamp = 2, .key = {1, 3}},
                                       .worker_id = 5,
                                       .incarnation = 1,
                                       .kind = answer,
                                       .payload_bytes = 100,
                                       .body = body});
  Bytes bytes(kPieceSizeBytes);
  std::memcpy(bytes.data(), &piece_bytes, sizeof piece_bytes);
  bytes.insert(bytes.end(), part.begin(), part.end());
  return bytes;
}

}  // namespace

std::vector<Bytes> make_seeds() {
  using Kind = cluster::ToTrainer::Kind;
  return {make(Kind::kWelcome, AnswerKind::kNone, 0, 0),  make(Kind::kRefused, AnswerKind::kNone, 0, 9),
          make(Kind::kAnswer, AnswerKind::kBatch, 0, 40), make(Kind::kAnswer, AnswerKind::kEnd, 0, 0),
          make(Kind::kAnswer, AnswerKind::kError, 0, 20), make(Kind::kPiece, AnswerKind::kNone, 60, 0)};
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  if (bytes.size() < kPieceSizeBytes + kPoolHeadBytes) bytes.resize(kPieceSizeBytes + kPoolHeadBytes);
  std::byte* part = bytes.data() + kPieceSizeBytes;
  if (choices.mostly()) std::memcpy(part, &kToTrainerMagic, sizeof kToTrainerMagic);
  if (choices.mostly()) std::memcpy(part + 4, &kPoolVersion, sizeof kPoolVersion);
  const auto kind = static_cast<uint8_t>(choices.below(2) == 0 ? kPiece : 1 + choices.below(9));
  if (choices.mostly()) part[kKindAt] = std::byte{kind};
  if (choices.mostly()) part[kKindAt + 1] &= std::byte{1};
  if (choices.mostly()) part[kAnswerKindAt] = std::byte(kind == kAnswer ? 1 + choices.below(3) : 0);
  if (choices.mostly()) part[kAnswerKindAt + 1] &= std::byte{kDescriptorFlags};
  if (choices.mostly()) std::fill_n(part + kAnswerKindAt + 2, 6, std::byte{0});
  const auto body_bytes = static_cast<uint32_t>(bytes.size() - kPieceSizeBytes - kPoolHeadBytes);
  if (choices.mostly()) std::memcpy(part + kBodyBytesAt, &body_bytes, sizeof body_bytes);
  const uint64_t payload_bytes = choices.below(1000);
  if (choices.mostly()) std::memcpy(part + kPayloadBytesAt, &payload_bytes, sizeof payload_bytes);
  const uint64_t offset = choices.below(payload_bytes + 1);
  if (choices.mostly()) std::memcpy(part + kOffsetAt, &offset, sizeof offset);
  const uint64_t piece_bytes = kind == kPiece ? 1 + choices.below(payload_bytes + 1) : 0;
  if (choices.mostly()) std::memcpy(bytes.data(), &piece_bytes, sizeof piece_bytes);
}

void check(std::span<const std::byte> bytes) {
  if (bytes.size() < kPieceSizeBytes) return;
  uint64_t piece_bytes = 0;
  std::memcpy(&piece_bytes, bytes.data(), sizeof piece_bytes);
  const auto part = bytes.subspan(kPieceSizeBytes);
  const auto parsed = parse_to_trainer(part, piece_bytes);
  if (!parsed) {
    expect(!parsed.error().message.empty(), "an error says what is wrong");
    return;
  }
  const PoolAnswer& answer = parsed.value();
  touch(answer.body);
  expect(answer.payload_bytes <= kPoolPayloadBytesMax, "batches are capped");
  expect(answer.payload_offset <= answer.payload_bytes, "a piece begins in its batch");
  expect(piece_bytes <= answer.payload_bytes - answer.payload_offset, "a piece ends in its batch");
  expect(std::ranges::equal(write_to_trainer(answer), part), "a message that is written again is the same bytes");
}

}  // namespace penstock::fuzz
