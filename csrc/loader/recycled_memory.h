// SPDX-License-Identifier: Apache-2.0
#pragma once
// Memory for the batches that threads of this process make. A freed block is reused for a tensor of the same size:
// memory that is new to the process costs a page fault per 4 KiB, which for a large batch takes longer than the copy
// into it.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/mutex.h"

namespace penstock::loader {

// Thread-safe. Tensors may outlive it, and be freed on any thread.
class RecycledMemory {
 public:
  // At most `kept_bytes_max` bytes of freed blocks are kept.
  explicit RecycledMemory(uint64_t kept_bytes_max) : blocks_(std::make_shared<Blocks>(kept_bytes_max)) {}
  ~RecycledMemory() { blocks_->close(); }
  RecycledMemory(const RecycledMemory&) = delete;
  RecycledMemory& operator=(const RecycledMemory&) = delete;

  // Returns an uninitialised contiguous tensor in a storage of exactly its bytes. Throws c10::Error if there is no
  // memory.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);

  uint64_t kept_bytes() const { return blocks_->kept_bytes(); }

 private:
  class Blocks {
   public:
    explicit Blocks(uint64_t kept_bytes_max) : kept_bytes_max_(kept_bytes_max) {}

    // Returns a freed block of exactly `bytes` bytes; null if there is none.
    at::DataPtr try_take(uint64_t bytes);
    void give_back(at::DataPtr block, uint64_t bytes);
    // Frees all blocks; none are kept from now on.
    void close();
    uint64_t kept_bytes() const;

   private:
    mutable Mutex mutex_;
    uint64_t kept_bytes_max_ PENSTOCK_GUARDED_BY(mutex_);
    uint64_t kept_bytes_ PENSTOCK_GUARDED_BY(mutex_) = 0;
    std::map<uint64_t, std::vector<at::DataPtr>> free_ PENSTOCK_GUARDED_BY(mutex_);
  };
  struct Loan;

  static void end_loan(void* loan);

  std::shared_ptr<Blocks> blocks_;  // shared by the tensors
};

}  // namespace penstock::loader
