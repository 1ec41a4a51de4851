// SPDX-License-Identifier: Apache-2.0
#pragma once
// The reads and effects of a TorchScript branch or loop that is kept whole.

#include <torch/csrc/jit/ir/ir.h>

#include <string>
#include <vector>

namespace penstock::capture {

struct ControlFlow {
  std::vector<const torch::jit::Value*> reads;      // all values read inside, whether made inside or not
  std::vector<const torch::jit::Node*> attributes;  // reads of attributes inside, in order
  bool writes = false;                              // a tensor is written to, or an operation is unknown
  const torch::jit::Node* refused = nullptr;
  std::string refusal;  // why it cannot be kept whole, or empty
};

ControlFlow read_control_flow(const torch::jit::Node* node);

}  // namespace penstock::capture
