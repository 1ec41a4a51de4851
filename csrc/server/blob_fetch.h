// SPDX-License-Identifier: Apache-2.0
#pragma once
// Fetches one blob from a worker's trainer: at most two requests are unanswered, chunks are accepted in order, and a
// missing chunk is requested again. Pure: the I/O thread that uses it owns the socket.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/instant.h"
#include "base/result.h"
#include "wire/blob_record.h"

namespace penstock::server {

constexpr size_t kBlobWishCountMax = 2;
constexpr Duration kBlobPatience = std::chrono::seconds(1);  // for a chunk, before it is requested again

// Thread-compatible.
class BlobFetch {
 public:
  // A blob larger than `bytes_max` is refused.
  BlobFetch(const wire::BlobId& id, uint64_t bytes_max) : id_(id), bytes_max_(bytes_max) {}

  const wire::BlobId& id() const { return id_; }

  // The requests to send now.
  std::vector<wire::BlobWish> take_wishes(Instant now);
  std::optional<Instant> due_at() const {
    return wished_at_ ? std::optional(*wished_at_ + kBlobPatience) : std::nullopt;
  }

  // kTooLarge, kMismatch if chunks disagree on the size of the blob, kNoMemory.
  Result<void> receive(const wire::BlobPiece& piece, std::span<const std::byte> bytes, Instant now);

  bool is_whole() const { return total_bytes_ > 0 && bytes_.size() == total_bytes_; }
  std::vector<std::byte> take_bytes() { return std::move(bytes_); }

 private:
  wire::BlobId id_;
  uint64_t bytes_max_;
  uint64_t total_bytes_ = 0;  // 0 until it is known
  std::vector<std::byte> bytes_;
  std::deque<uint64_t> wished_offsets_;  // that are unanswered
  std::optional<Instant> wished_at_;     // when the last request was sent or the last chunk arrived
};

}  // namespace penstock::server
