// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where the tensors of a batch are allocated: in the slab of a worker process, or in memory that a trainer's threads
// reuse.

#include <ATen/core/Tensor.h>

namespace penstock::dataset {

class Memory {
 public:
  Memory() = default;
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  virtual ~Memory() = default;

  // Returns a contiguous, uninitialised tensor. Throws c10::Error if the system has no memory.
  virtual at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) = 0;
};

}  // namespace penstock::dataset
