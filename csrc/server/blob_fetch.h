// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a worker gets one blob from its trainer: at most two wishes are unanswered, pieces are taken in order, and a
// piece that does not come is wished for again. Pure: the I/O thread around it has the socket.

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
constexpr Duration kBlobPatience = std::chrono::seconds(1);  // for a piece, before it is wished for again

// Thread-compatible.
class BlobFetch {
 public:
  // A blob above `bytes_max` is refused.
  BlobFetch(const wire::BlobId& id, uint64_t bytes_max) : id_(id), bytes_max_(bytes_max) {}

  const wire::BlobId& id() const { return id_; }

  // The wishes to be sent now.
  std::vector<wire::BlobWish> take_wishes(Instant now);
  std::optional<Instant> due_at() const {
    return wished_at_ ? std::optional(*wished_at_ + kBlobPatience) : std::nullopt;
  }

  // kTooLarge, kMismatch when the blob is not always of the same size, kNoMemory.
  Result<void> receive(const wire::BlobPiece& piece, std::span<const std::byte> bytes, Instant now);

  bool is_whole() const { return total_bytes_ > 0 && bytes_.size() == total_bytes_; }
  std::vector<std::byte> take_bytes() { return std::move(bytes_); }

 private:
  wire::BlobId id_;
  uint64_t bytes_max_;
  uint64_t total_bytes_ = 0;  // 0 while it is not known
  std::vector<std::byte> bytes_;
  std::deque<uint64_t> wished_offsets_;  // and not answered
  std::optional<Instant> wished_at_;     // when the last one was sent, or the last piece came
};

}  // namespace penstock::server
