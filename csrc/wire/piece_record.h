// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages of a pool's data connections: one part, consisting of an unencrypted head of 64 bytes and the encrypted
// bytes after it, whose seal covers the head as well. The bytes of a batch are sent in chunks, in order. PROTOCOL.md is
// the specification; net/seal.h has the seal.

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
// On a slow link the chunks show that the worker is alive, so a chunk must be transferred in less than a lease.
constexpr uint64_t kPieceBytesMax = uint64_t{1} << 20;
constexpr uint64_t kPieceMessageBytesMax = kPieceHeadBytes + kPieceBytesMax + kSealTagBytes;
constexpr uint64_t kPoolPayloadBytesMax = uint64_t{1} << 34;  // of a batch and its record

struct PieceHead {
  enum class Kind : uint8_t {
    kJoin = 1,  // a trainer's first and only message: this is the connection for the chunks of the link
    kPiece,     // from a worker: some of the bytes of a batch
  };
  Kind kind = Kind::kPiece;
  uint64_t sender = 0;  // the id of the trainer or of the worker
  uint32_t link = 0;
  uint64_t counter = 0;  // of the messages sealed with one key, from 1
  BatchKey key{};
  uint64_t payload_bytes = 0;   // of the whole batch, its record included
  uint64_t payload_offset = 0;  // the position of this chunk

  friend bool operator==(const PieceHead&, const PieceHead&) = default;
};

using PieceHeadBytes = std::array<std::byte, kPieceHeadBytes>;
PieceHeadBytes write_piece_head(const PieceHead& head);

// A received message. None of it is trusted before its seal is verified.
struct SealedPiece {
  PieceHead head;
  std::span<const std::byte> head_bytes;  // 64
  std::span<const std::byte> sealed;      // the bytes of the chunk, and the tag

  size_t size() const { return sealed.size() - kSealTagBytes; }
};

// The spans of the result point into `message`. kMalformed, kTooLarge, or kMismatch for another version.
Result<SealedPiece> parse_piece(std::span<const std::byte> message);

}  // namespace penstock::wire
