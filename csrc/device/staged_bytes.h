// SPDX-License-Identifier: Apache-2.0
#pragma once
// The bytes of batches that have passed the stages and were not delivered to the trainer yet. A batch holds its share
// of them until it is delivered or dropped.

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace penstock::device {

// Thread-safe.
class StagedBytes {
 public:
  // Confined to the thread that holds the batch.
  class Share {
   public:
    Share() = default;
    Share(std::shared_ptr<std::atomic<uint64_t>> total, uint64_t bytes) : total_(std::move(total)), bytes_(bytes) {
      total_->fetch_add(bytes_);
    }
    Share(Share&& other) noexcept : total_(std::move(other.total_)), bytes_(other.bytes_) {}
    Share& operator=(Share&& other) noexcept {
      Share old(std::move(*this));
      total_ = std::move(other.total_);
      bytes_ = other.bytes_;
      return *this;
    }
    ~Share() {
      if (total_) total_->fetch_sub(bytes_);
    }

   private:
    std::shared_ptr<std::atomic<uint64_t>> total_;
    uint64_t bytes_ = 0;
  };

  Share take(uint64_t bytes) { return {total_, bytes}; }
  uint64_t value() const { return total_->load(); }

 private:
  // Owned by the chain and by the shares, which may outlive it.
  std::shared_ptr<std::atomic<uint64_t>> total_ = std::make_shared<std::atomic<uint64_t>>(0);
};

}  // namespace penstock::device
