// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a worker receives the parts of requests that are sent only once: jobs, prefixes, folders of modules. Each is a
// blob, identified by the SHA-256 of its bytes, so it is transferred only once, even if links and trainers change. The
// worker requests it chunk by chunk, at its own pace, and repeats the request for missing chunks; neither side keeps
// state about the other. These messages do not belong to a link. PROTOCOL.md is the specification.

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
// Small enough that a slow link transfers two chunks in a fraction of a lease: pings queue behind them.
constexpr uint64_t kBlobPieceBytesMax = uint64_t{256} << 10;

using BlobId = std::array<std::byte, 32>;
static_assert(alignof(BlobId) == 1);

// The consecutive ids in `bytes`, whose size must be a multiple of an id's.
std::span<const BlobId> blob_ids(std::span<const std::byte> bytes);

// To a trainer: requests the chunk that starts at `offset`.
struct BlobWish {
  BlobId id{};
  uint64_t offset = 0;

  friend bool operator==(const BlobWish&, const BlobWish&) = default;
};

// To a worker, before a second part of at most kBlobPieceBytesMax: the chunk that starts at `offset`, of `total_bytes`.
struct BlobPiece {
  BlobId id{};
  uint64_t offset = 0;
  uint64_t total_bytes = 0;

  friend bool operator==(const BlobPiece&, const BlobPiece&) = default;
};

// To a worker: the trainer does not have the blob, or no longer has it.
struct BlobUnknown {
  BlobId id{};

  friend bool operator==(const BlobUnknown&, const BlobUnknown&) = default;
};

using BlobMessage = std::variant<BlobWish, BlobPiece, BlobUnknown>;

// Whether a message's first part starts like these messages, and not like a message of pool_record.h.
bool is_blob_message(std::span<const std::byte> part);

std::vector<std::byte> write_blob_message(const BlobMessage& message);

// kMalformed, or kMismatch for another version. `piece_bytes` is the size of the message's second part, 0 if there is
// none. A blob has at least one byte.
Result<BlobMessage> parse_blob_message(std::span<const std::byte> part, uint64_t piece_bytes);

}  // namespace penstock::wire
