// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reads operator calls in a TorchScript program. The arguments of dispatcher operators are arranged by their schemas;
// operators that TorchScript computes itself are kept.

#include <torch/csrc/jit/ir/ir.h>

#include "capture/values.h"

namespace penstock::capture {

// Makes a node of the graph from `node`. Throws Refusal if it has no form there.
void read_call(ProgramValues& values, const torch::jit::Node* node);

}  // namespace penstock::capture
