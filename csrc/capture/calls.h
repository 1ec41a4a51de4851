// SPDX-License-Identifier: Apache-2.0
#pragma once
// Calls of operators in a TorchScript program. Operators of the dispatcher are laid out as their schemas say; operators
// that TorchScript computes by itself stay.

#include <torch/csrc/jit/ir/ir.h>

#include "capture/values.h"

namespace penstock::capture {

// Makes a node of the graph of `node`. Throws Refusal where it has no form there.
void read_call(ProgramValues& values, const torch::jit::Node* node);

}  // namespace penstock::capture
