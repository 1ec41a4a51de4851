// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a worker gets the parts of requests that are sent once: jobs, prefixes, folders of modules. Each is a blob, named
// by the SHA-256 of its bytes, so that it crosses once however links and trainers come and go. The worker asks for it
// piece by piece, at its own pace, and asks again for pieces that did not come; neither side keeps an account of the
// other. These messages belong to no link. PROTOCOL.md is the specification.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "base/result.h"

namespace penstock::wire {

constexpr uint32_t kBlobMagic = 0x31424e50;  // "PNB1"
constexpr uint16_t kBlobVersion = 1;
constexpr size_t kBlobRecordBytes = 64;
constexpr uint64_t kBlobBytesMax = uint64_t{1} << 38;
// Small enough that a slow link carries two of them in a fraction of a lease: pings wait behind them.
constexpr uint64_t kBlobPieceBytesMax = uint64_t{256} << 10;

using BlobId = std::array<std::byte, 32>;
static_assert(alignof(BlobId) == 1);

// The ids that lie one after the other in `bytes`, which are a whole number of them.
std::span<const BlobId> blob_ids(std::span<const std::byte> bytes);

// To a trainer: send me the piece that begins at `offset`.
struct BlobWish {
  BlobId id{};
  uint64_t offset = 0;

  friend bool operator==(const BlobWish&, const BlobWish&) = default;
};

// To a worker, before a second part of at most kBlobPieceBytesMax: the piece that begins at `offset`, of `total_bytes`.
struct BlobPiece {
  BlobId id{};
  uint64_t offset = 0;
  uint64_t total_bytes = 0;

  friend bool operator==(const BlobPiece&, const BlobPiece&) = default;
};

// To a worker: the trainer does not have it, or has it no more.
struct BlobUnknown {
  BlobId id{};

  friend bool operator==(const BlobUnknown&, const BlobUnknown&) = default;
};

using BlobMessage = std::variant<BlobWish, BlobPiece, BlobUnknown>;

// Whether a message's first part begins as these do, and not as one of pool_record.h.
bool is_blob_message(std::span<const std::byte> part);

std::vector<std::byte> write_blob_message(const BlobMessage& message);

// kMalformed, or kMismatch for another version. `piece_bytes` is the size of the message's second part, 0 where it has
// none. A blob has at least one byte.
Result<BlobMessage> parse_blob_message(std::span<const std::byte> part, uint64_t piece_bytes);

}  // namespace penstock::wire
