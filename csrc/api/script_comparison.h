// SPDX-License-Identifier: Apache-2.0
#pragma once
// Holds the part of a scripted module that stays against the whole, results and gradients, bit for bit. Both run on
// copies of the module, under the same random numbers, and nothing of it can be seen by the program. It is what
// python/penstock/cut/whole_comparison.py does for Python's programs.

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>

#include <optional>
#include <span>
#include <string>

#include "capture/program.h"

namespace penstock::api {

// A program is profiled and optimized from its second run on, and so are the programs of its gradients. From this run
// on it stays as it is.
inline constexpr int kSettledRuns = 4;

// One way to compute: a part, and the tensors that it takes beside the call.
struct ScriptSide {
  const capture::ScriptPart& part;
  std::span<const at::Tensor> more = {};
};

// The first kind of difference between two sides, such as "gradients", or nothing. `devices` are those that they run
// on, beside the CPU.
std::optional<std::string> first_difference(const torch::jit::Module& module, const capture::ScriptCall& call,
                                            const ScriptSide& whole, const ScriptSide& part,
                                            std::span<const c10::Device> devices);

// Runs a side as often as TorchScript needs to optimize it, forward and backward.
void settle(const torch::jit::Module& module, const capture::ScriptCall& call, const ScriptSide& side,
            std::span<const c10::Device> devices);

}  // namespace penstock::api
