// SPDX-License-Identifier: Apache-2.0
#pragma once
// The nodes of a TorchScript program by kind: operator calls, computations on numbers, and the control flow that is
// kept whole.

#include <torch/csrc/jit/ir/ir.h>

#include <string>
#include <vector>

#include "capture/builder.h"

namespace penstock::capture {

// Makes a node of the graph from `node`, an operator call. The arguments of dispatcher operators are arranged by their
// schemas; operators that TorchScript computes itself are kept. Throws Refusal if the call has no form in the graph.
void read_call(ProgramValues& values, const torch::jit::Node* node);

// Whether `node` computes a number of the program: a fact about a tensor that does not depend on its contents,
// arithmetic on such facts, a truth value, or whether a value is None. If so, binds its result to the number. Numbers
// that are known now are computed at once; the others become nodes of size:: operators. Throws Refusal if the number
// cannot be captured.
bool read_number(ProgramValues& values, const torch::jit::Node* node);

// The reads and effects of a TorchScript branch or loop that is kept whole.
struct ControlFlow {
  std::vector<const torch::jit::Value*> reads;      // all values read inside, whether made inside or not
  std::vector<const torch::jit::Node*> attributes;  // reads of attributes inside, in order
  bool writes = false;                              // a tensor is written to, or an operation is unknown
  const torch::jit::Node* refused = nullptr;
  std::string refusal;  // why it cannot be kept whole, or empty
};

ControlFlow read_control_flow(const torch::jit::Node* node);

}  // namespace penstock::capture
