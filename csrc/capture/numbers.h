// SPDX-License-Identifier: Apache-2.0
#pragma once
// Numbers of a TorchScript program: facts about a tensor that do not depend on its contents, arithmetic on them, truth
// values, and whether a value is None. Numbers that are known now are computed at once; the others become nodes of
// size:: operators.

#include <torch/csrc/jit/ir/ir.h>

#include "capture/values.h"

namespace penstock::capture {

// Whether `node` computes such a number; if so, binds its result to the number. Throws Refusal if the number cannot be
// captured.
bool read_number(ProgramValues& values, const torch::jit::Node* node);

}  // namespace penstock::capture
