// SPDX-License-Identifier: Apache-2.0
#pragma once
// The job parts that a server received last, for job processes that start later: each of them is a new process, and the
// loaders of one program, or its next run, often have parts in common. A part is given only to jobs of the key that
// sent it, because knowing its id is no proof of the right to read it.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "net/keys.h"
#include "wire/blob_record.h"

namespace penstock::server {

constexpr uint64_t kCachedBlobBytesMax = uint64_t{8} << 20;  // of all entries together

// Thread-compatible.
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
