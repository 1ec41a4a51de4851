// SPDX-License-Identifier: Apache-2.0
#pragma once
// The blobs that a server gets from its trainers: BlobFetch fetches one, BlobCache keeps the last ones for the next
// job.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "net/keys.h"
#include "wire/blob_record.h"

namespace penstock::server {

constexpr size_t kBlobRequestCountMax = 2;
constexpr Duration kBlobPatience = std::chrono::seconds(1);  // for a chunk, before it is requested again

// Fetches one blob from a worker's trainer: at most two requests are unanswered, chunks are accepted in order, and a
// missing chunk is requested again. Pure: the I/O thread that uses it owns the socket. Thread-compatible.
class BlobFetch {
 public:
  // A blob larger than `bytes_max` is refused.
  BlobFetch(const wire::BlobId& id, uint64_t bytes_max) : id_(id), bytes_max_(bytes_max) {}

  const wire::BlobId& id() const { return id_; }

  // The requests to send now.
  std::vector<wire::BlobRequest> take_requests(Instant now);
  std::optional<Instant> due_at() const {
    return requested_at_ ? std::optional(*requested_at_ + kBlobPatience) : std::nullopt;
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
  std::deque<uint64_t> requested_offsets_;  // that are unanswered
  std::optional<Instant> requested_at_;     // when the last request was sent or the last chunk arrived
};

constexpr uint64_t kCachedBlobBytesMax = uint64_t{8} << 20;  // of all entries together

// The job parts that a server received last, for job processes that start later: each of them is a new process, and the
// loaders of one program, or its next run, often have parts in common. A part is given only to jobs of the key that
// sent it, because knowing its id is no proof of the right to read it. Thread-compatible.
class BlobCache {
 public:
  // Keeps a blob, and drops the oldest if they exceed the limit. A blob above the total limit is not kept.
  void put(const net::PublicKey& owner, const wire::BlobId& id, const std::vector<std::byte>& bytes) {
    if (bytes.size() > kCachedBlobBytesMax || find(owner, id) != nullptr) return;
    bytes_ += bytes.size();
    while (bytes_ > kCachedBlobBytesMax) {
      bytes_ -= entries_.front().bytes.size();
      entries_.pop_front();
    }
    entries_.push_back({.owner = owner, .id = id, .bytes = bytes});
  }

  // Null if it is not kept for this owner.
  const std::vector<std::byte>* find(const net::PublicKey& owner, const wire::BlobId& id) const {
    for (const Entry& entry : entries_)
      if (entry.owner == owner && entry.id == id) return &entry.bytes;
    return nullptr;
  }

 private:
  struct Entry {
    net::PublicKey owner{};
    wire::BlobId id{};
    std::vector<std::byte> bytes;
  };

  std::deque<Entry> entries_;  // oldest first
  uint64_t bytes_ = 0;
};

}  // namespace penstock::server
