// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages of a pool's data connections: one part, of a head of 64 bytes that can be read by anyone and the sealed
// bytes behind it, whose seal covers the head as well. The bytes of a batch come in pieces, in their order.
// PROTOCOL.md is the specification; net/seal.h has the seal.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "base/result.h"
#include "wire/batch_key.h"

namespace penstock::wire {

constexpr uint32_t kPieceMagic = 0x31504e50;  // "PNP1"
constexpr uint16_t kPieceVersion = 1;
constexpr size_t kPieceHeadBytes = 64;
constexpr size_t kSealTagBytes = 16;  // of AES-GCM and of ChaCha20-Poly1305
// On a slow link the pieces are the worker's signs of life, so a piece must cross it in less than a lease.
constexpr uint64_t kPieceBytesMax = uint64_t{1} << 20;
constexpr uint64_t kPieceMessageBytesMax = kPieceHeadBytes + kPieceBytesMax + kSealTagBytes;
constexpr uint64_t kPoolPayloadBytesMax = uint64_t{1} << 34;  // of a batch and its record

struct PieceHead {
  enum class Kind : uint8_t {
    kJoin = 1,  // a trainer's first and only message: this is the connection for the pieces of the link
    kPiece,     // a worker's: some of the bytes of a batch
  };
  Kind kind = Kind::kPiece;
  uint64_t sender = 0;  // the id of the trainer or of the worker
  uint32_t link = 0;
  uint64_t counter = 0;  // of the messages that were sealed with one key, from 1
  BatchKey key{};
  uint64_t payload_bytes = 0;   // of the whole batch, its record included
  uint64_t payload_offset = 0;  // where this piece belongs

  friend bool operator==(const PieceHead&, const PieceHead&) = default;
};

using PieceHeadBytes = std::array<std::byte, kPieceHeadBytes>;
PieceHeadBytes write_piece_head(const PieceHead& head);

// A message that was received. Nothing of it is known to be true before its seal was opened.
struct SealedPiece {
  PieceHead head;
  std::span<const std::byte> head_bytes;  // 64
  std::span<const std::byte> sealed;      // the bytes of the piece, and the tag

  size_t size() const { return sealed.size() - kSealTagBytes; }
};

// The spans of the result lie in `message`. kMalformed, kTooLarge, or kMismatch for another version.
Result<SealedPiece> parse_piece(std::span<const std::byte> message);

}  // namespace penstock::wire
