// SPDX-License-Identifier: Apache-2.0
#pragma once
// Compares the part of a scripted module that stays in the trainer with the whole module, results and gradients, bit
// for bit. Both run on copies of the module with the same random numbers, and the program cannot observe any of it. The
// counterpart for Python programs is python/penstock/cut/whole_comparison.py.

#include <ATen/core/Tensor.h>
#include <torch/csrc/jit/api/module.h>

#include <optional>
#include <span>
#include <string>

#include "capture/program.h"

namespace penstock::api {

// TorchScript profiles and optimizes a program, and the programs of its gradients, from the second run on. From this
// run on the program stays the same.
inline constexpr int kSettledRuns = 4;

// One side of the comparison: a part of the program, and the tensors that it takes in addition to the call.
struct ScriptSide {
  const capture::ScriptPart& part;
  std::span<const at::Tensor> more = {};
};

// The first kind of difference between two sides, such as "gradients", or nothing. `devices` are the devices that they
// run on, in addition to the CPU.
std::optional<std::string> first_difference(const torch::jit::Module& module, const capture::ScriptCall& call,
                                            const ScriptSide& whole, const ScriptSide& part,
                                            std::span<const c10::Device> devices);

// Runs a side, forward and backward, as often as TorchScript needs to optimize it.
void settle(const torch::jit::Module& module, const capture::ScriptCall& call, const ScriptSide& side,
            std::span<const c10::Device> devices);

}  // namespace penstock::api
