// SPDX-License-Identifier: Apache-2.0
#pragma once
// Numbers of a TorchScript program: facts about a tensor that do not depend on its contents, arithmetic on them,
// truths, and whether a value is None. Numbers that are known now are computed at once; the others become nodes of
// size:: operators.

#include <torch/csrc/jit/ir/ir.h>

#include "capture/values.h"

namespace penstock::capture {

// Whether `node` gives such a number, to which its result is bound then. Throws Refusal where it is one that cannot be
// captured.
bool read_number(ProgramValues& values, const torch::jit::Node* node);

}  // namespace penstock::capture
