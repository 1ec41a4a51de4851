// SPDX-License-Identifier: Apache-2.0
#pragma once
// A cache that is filled once and evicts nothing: the optimum for orders that read each item once an epoch.

#include <atomic>
#include <cstdint>
#include <optional>

namespace penstock::cache {

// Admits items while their bytes fit into a budget. The count of admitted bytes may be in memory that processes share.
// Thread-safe, also between processes.
class FillOnce {
 public:
  // `admitted_bytes` starts at 0 and must outlive this object.
  FillOnce(std::atomic<uint64_t>& admitted_bytes, uint64_t budget_bytes)
      : admitted_bytes_(&admitted_bytes), budget_bytes_(budget_bytes) {}

  // Returns the place of the item: the bytes that were admitted before it. No value if it does not fit; a smaller item
  // may.
  std::optional<uint64_t> admit(uint64_t bytes) {
    uint64_t place = admitted_bytes_->load(std::memory_order_relaxed);
    do {
      if (bytes > budget_bytes_ || place > budget_bytes_ - bytes) return std::nullopt;
    } while (!admitted_bytes_->compare_exchange_weak(place, place + bytes, std::memory_order_relaxed));
    return place;
  }

  uint64_t left_bytes() const {
    const uint64_t admitted = admitted_bytes_->load(std::memory_order_relaxed);
    return admitted < budget_bytes_ ? budget_bytes_ - admitted : 0;
  }

 private:
  std::atomic<uint64_t>* admitted_bytes_;
  uint64_t budget_bytes_;
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace penstock::cache
