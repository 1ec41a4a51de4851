// SPDX-License-Identifier: Apache-2.0
#pragma once
// The transform of a loader: a scripted module that runs on every batch where the batch is made.

#include <torch/csrc/jit/api/module.h>

#include "penstock/value.h"

namespace penstock::api {

// Throws Error kUnsupported if the module draws random numbers: threads share torch's default generator.
void check_draws_nothing(const torch::jit::Module& module);

// Confined to its thread.
class BatchTransform {
 public:
  // Runs a copy of `module`, operator by operator: TorchScript's optimizer may change rounding from the second run on.
  explicit BatchTransform(const torch::jit::Module& module) : module_(module.deepcopy()) {}

  Value apply(const Value& batch);

 private:
  torch::jit::Module module_;
};

}  // namespace penstock::api
