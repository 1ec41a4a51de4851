// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory that sealed pieces are written to and stay in until ZeroMQ has sent them. It is reused, so that the system
// does not have to provide new pages for each piece, and small, so that it stays in the processor's caches.

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "wire/piece_record.h"

namespace penstock::net {

constexpr size_t kSealedBufferCountMax = 4;

// Thread-safe.
class SealedBuffers {
 public:
  using Buffer = std::unique_ptr<std::byte[]>;  // of kPieceMessageBytesMax bytes

  // `on_room` is called when a buffer is given back while all were taken.
  explicit SealedBuffers(std::function<void()> on_room) : on_room_(std::move(on_room)) {}

  bool has_room() const {
    MutexLock lock(mutex_);
    return out_count_ < kSealedBufferCountMax;
  }

  Buffer take() {
    MutexLock lock(mutex_);
    ++out_count_;
    if (free_.empty()) return std::make_unique_for_overwrite<std::byte[]>(wire::kPieceMessageBytesMax);
    Buffer buffer = std::move(free_.back());
    free_.pop_back();
    return buffer;
  }

  void give_back(Buffer buffer) {
    bool was_full = false;
    {
      MutexLock lock(mutex_);
      was_full = out_count_-- == kSealedBufferCountMax;
      free_.push_back(std::move(buffer));
    }
    if (was_full) on_room_();
  }

 private:
  const std::function<void()> on_room_;
  mutable Mutex mutex_;
  std::vector<Buffer> free_ PENSTOCK_GUARDED_BY(mutex_);
  size_t out_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
};

}  // namespace penstock::net
