// SPDX-License-Identifier: Apache-2.0
// Messages of a data connection, as a trainer and a worker read them before they open the seal.
#include <algorithm>
#include <cstring>

#include "fuzz_target.h"
#include "wire/pool_record.h"

namespace penstock::fuzz {

using namespace penstock::wire;

namespace {

constexpr size_t kKindAt = 6, kSenderAt = 8, kCounterAt = 24, kSequenceAt = 32, kPayloadBytesAt = 40, kOffsetAt = 48,
                 kReservedAt = 56;

Bytes make(const wire::PieceHead& head, size_t piece_bytes) {
  const auto record = wire::write_piece_head(head);
  Bytes bytes(record.begin(), record.end());
  bytes.resize(bytes.size() + piece_bytes + wire::kSealTagBytes, std::byte{7});
  return bytes;
}

void put(Bytes& bytes, size_t at, uint64_t value) { std::memcpy(bytes.data() + at, &value, sizeof value); }

}  // namespace

std::vector<Bytes> make_seeds() {
  const wire::PieceHead piece{.sender = 5, .link = 1, .counter = 2, .key = {1, 3}, .payload_bytes = 200};
  wire::PieceHead last = piece;
  last.payload_offset = 150;
  return {make(piece, 150), make(last, 50),
          make({.kind = wire::PieceHead::Kind::kJoin, .sender = 7, .link = 1, .counter = 1}, 0)};
}

void mutate(Bytes& bytes, Choices& choices) {
  edit_at_random(bytes);
  constexpr size_t kBytesLeast = wire::kPieceHeadBytes + wire::kSealTagBytes;
  if (bytes.size() < kBytesLeast) bytes.resize(kBytesLeast);
  const bool is_join = choices.below(4) == 0;
  if (is_join && choices.mostly()) bytes.resize(kBytesLeast + (choices.mostly() ? 0 : 1));
  if (choices.mostly()) std::memcpy(bytes.data(), &wire::kPieceMagic, sizeof wire::kPieceMagic);
  if (choices.mostly()) std::memcpy(bytes.data() + 4, &wire::kPieceVersion, sizeof wire::kPieceVersion);
  if (choices.mostly()) bytes[kKindAt] = std::byte(is_join ? 1 : 2);
  if (choices.mostly()) bytes[kKindAt + 1] = std::byte{0};
  if (choices.mostly()) bytes[kSenderAt] |= std::byte{1};
  if (choices.mostly()) bytes[kCounterAt] |= std::byte{1};
  if (choices.mostly()) put(bytes, kReservedAt, 0);
  if (is_join) {
    if (choices.mostly()) put(bytes, kSequenceAt, 0);
    if (choices.mostly()) std::memset(bytes.data() + 20, 0, 4);
  }
  // Some of it is above its cap, and some pieces lie outside of their batch.
  const uint64_t piece_bytes = bytes.size() - kBytesLeast;
  const uint64_t payload_bytes = is_join ? 0 : choices.below(wire::kPoolPayloadBytesMax + 50);
  uint64_t offset = choices.below(payload_bytes + 1);
  if (payload_bytes >= piece_bytes && choices.mostly()) offset = choices.below(payload_bytes - piece_bytes + 2);
  if (choices.mostly()) put(bytes, kPayloadBytesAt, payload_bytes);
  if (choices.mostly()) put(bytes, kOffsetAt, is_join ? 0 : offset);
}

bool check(std::span<const std::byte> bytes) {
  const auto parsed = wire::parse_piece(bytes);
  if (!parsed) return is_refused(parsed.error().message);
  const wire::SealedPiece& piece = parsed.value();
  touch(piece.sealed);
  expect(piece.head_bytes.size() + piece.sealed.size() == bytes.size(), "nothing is left over");
  expect(piece.head.sender != 0 && piece.head.counter != 0, "a message is somebody's and has a number");
  expect(piece.size() <= wire::kPieceBytesMax, "pieces are capped");
  expect(piece.head.payload_bytes <= wire::kPoolPayloadBytesMax, "batches are capped");
  if (piece.head.kind == wire::PieceHead::Kind::kJoin) {
    expect(piece.size() == 0, "a trainer that joins sends no bytes");
  } else {
    expect(piece.size() > 0, "a piece has bytes");
    expect(piece.head.payload_offset <= piece.head.payload_bytes, "a piece begins in its batch");
    expect(piece.size() <= piece.head.payload_bytes - piece.head.payload_offset, "a piece ends in its batch");
  }
  expect(std::ranges::equal(wire::write_piece_head(piece.head), piece.head_bytes),
         "a head that is written again is the same bytes");
  return true;
}

}  // namespace penstock::fuzz
