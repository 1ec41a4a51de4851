// SPDX-License-Identifier: Apache-2.0
#pragma once
// Where torch's knowledge enters the graph: the effect of each operator from the dispatcher's schemas and tags, and
// TorchScript programs as graphs.

#include <ATen/core/Tensor.h>

#include <span>
#include <vector>

#include "base/result.h"
#include "graph/ir.h"

namespace torch::jit {
struct Module;
struct Function;
}  // namespace torch::jit

namespace penstock::capture {

// Fills graph.traits. An operator that cannot be looked up keeps Purity::kUnknown and a reason; nothing fails.
void annotate(graph::Graph& graph);

struct Captured {
  graph::Graph graph;                 // annotated
  std::vector<at::Tensor> constants;  // of its const and state inputs, in their order; the module's own tensors
};

// The module's forward as one straight-line graph, in the mode (train or eval) that it is in. `leaves` are the tensors
// of an example batch, flattened; their dtypes and ranks are recorded, their sizes become symbols. Parameters that
// require grad and tensors that forward writes are state, other tensors constants. An operation that is not
// straight-line or not in the dispatcher is kUnsupported, and the message names it and its source line. The module is
// not changed.
Result<Captured> capture_torchscript(const torch::jit::Module& module, std::span<const at::Tensor> leaves);
Result<Captured> capture_torchscript(torch::jit::Function& function, std::span<const at::Tensor> leaves);

// Hash of a tensor's dtype, sizes and elements, as const inputs carry it. The tensor is on the CPU.
std::string content_digest(const at::Tensor& tensor);

}  // namespace penstock::capture
