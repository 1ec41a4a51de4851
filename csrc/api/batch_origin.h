// SPDX-License-Identifier: Apache-2.0
#pragma once
// What an offloaded module has to know of a batch: its tensors as they came, and what workers have computed of them.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "penstock/batch.h"

namespace penstock {

struct BatchOrigin {
  // A tensor of the batch. A write to it is seen by its version, and new memory by its address.
  struct Leaf {
    at::Tensor tensor;
    const void* address = nullptr;
    uint32_t version = 0;

    explicit Leaf(at::Tensor of)
        : tensor(std::move(of)),
          address(tensor.const_data_ptr()),
          version(tensor.is_inference() ? 0 : tensor.unsafeGetTensorImpl()->version_counter().current_version()) {}
    bool is_as_it_came() const {
      return !tensor.is_inference() && tensor.const_data_ptr() == address &&
             tensor.unsafeGetTensorImpl()->version_counter().current_version() == version;
    }
  };

  std::vector<Leaf> leaves;  // by the numbers that workers know them by
  std::vector<std::string> keys{};
  std::vector<at::Tensor> boundary{};  // of these keys

  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> tensors;
    tensors.reserve(leaves.size());
    for (const Leaf& leaf : leaves) tensors.push_back(leaf.tensor);
    return tensors;
  }
  // The boundary tensor of a key; undefined if there is none.
  at::Tensor find(const std::string& key) const {
    for (size_t index = 0; index < keys.size(); ++index)
      if (keys[index] == key) return boundary[index];
    return {};
  }
};

// The way of this library into a Batch.
struct BatchAccess {
  static void set_origin(Batch& batch, BatchOrigin origin) {
    batch.origin_ = std::make_shared<const BatchOrigin>(std::move(origin));
  }
  // Null for a batch that came before anything was offloaded to its loader.
  static const BatchOrigin* origin_of(const Batch& batch) {
    return static_cast<const BatchOrigin*>(batch.origin_.get());
  }
};

}  // namespace penstock
