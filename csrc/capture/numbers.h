// SPDX-License-Identifier: Apache-2.0
#pragma once
// Numbers of a TorchScript program: what is known of a tensor without its contents, arithmetic on that, truths, and
// whether something is None. What is known now is computed at once; the rest becomes nodes of size:: operators.

#include <torch/csrc/jit/ir/ir.h>

#include "capture/values.h"

namespace penstock::capture {

// Whether `node` gives such a number, to which its result is bound then. Throws Refusal where it is one that cannot be
// captured.
bool read_number(ProgramValues& values, const torch::jit::Node* node);

}  // namespace penstock::capture
