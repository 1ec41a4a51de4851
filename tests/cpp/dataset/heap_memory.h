// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ops/empty.h>

#include "dataset/collator.h"

namespace penstock::dataset {

// Memory of the heap, and how often it was asked.
class HeapMemory final : public Memory {
 public:
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) override {
    ++tensor_count;
    return at::empty(sizes, at::TensorOptions().dtype(dtype));
  }
  int tensor_count = 0;
};

}  // namespace penstock::dataset
