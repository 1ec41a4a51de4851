// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of jobs that a server was sent last, for processes of jobs that begin later: each is a new one, and the
// loaders of one program, or its next run, often have the same parts. A part is given only to jobs of the key that it
// came from, as its name alone is no proof that somebody may have it.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "net/keys.h"
#include "wire/blob_record.h"

namespace penstock::server {

constexpr uint64_t kCachedBlobBytesMax = uint64_t{8} << 20;  // of all together

// Thread-compatible.
class BlobCache {
 public:
  // Keeps it, and lets the oldest go where they are too many. A larger one than all may have is not kept.
  void put(const net::PublicKey& owner, const wire::BlobId& id, const std::vector<std::byte>& bytes) {
    if (bytes.size() > kCachedBlobBytesMax || find(owner, id) != nullptr) return;
    bytes_ += bytes.size();
    while (bytes_ > kCachedBlobBytesMax) {
      bytes_ -= entries_.front().bytes.size();
      entries_.pop_front();
    }
    entries_.push_back({.owner = owner, .id = id, .bytes = bytes});
  }

  // Null where it is not kept for this owner.
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

  std::deque<Entry> entries_;  // the oldest first
  uint64_t bytes_ = 0;
};

}  // namespace penstock::server
