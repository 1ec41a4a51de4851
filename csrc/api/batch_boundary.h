// SPDX-License-Identifier: Apache-2.0
#pragma once
// What workers have computed of a batch for an offloaded module.

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/batch.h"

namespace penstock {

struct BatchBoundary {
  std::vector<std::string> keys;
  std::vector<at::Tensor> tensors;

  // The tensor of a key; undefined if there is none.
  at::Tensor find(const std::string& key) const {
    for (size_t index = 0; index < keys.size(); ++index)
      if (keys[index] == key) return tensors[index];
    return {};
  }
};

// The way of this library into a Batch.
struct BatchAccess {
  static void set_boundary(Batch& batch, BatchBoundary boundary) {
    batch.boundary_ = std::make_shared<const BatchBoundary>(std::move(boundary));
  }
  // Null where the batch came without.
  static const BatchBoundary* boundary_of(const Batch& batch) {
    return static_cast<const BatchBoundary*>(batch.boundary_.get());
  }
};

}  // namespace penstock
