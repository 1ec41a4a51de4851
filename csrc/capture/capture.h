// SPDX-License-Identifier: Apache-2.0
#pragma once
// Brings torch's knowledge into the graph: the effect of each operator, from the dispatcher's schemas and tags, and
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

// Fills graph.traits. An operator that cannot be looked up keeps Purity::kUnknown and a reason; annotate() does not
// fail.
void annotate(graph::Graph& graph);

struct Captured {
  graph::Graph graph;                 // annotated
  std::vector<at::Tensor> constants;  // of its const and state inputs, in their order; the module's tensors, not copies
};

// Captures the module's forward as one straight-line graph, in its present mode (train or eval). `leaves` are the
// tensors of an example batch, flattened; their dtypes and ranks are recorded, their sizes become symbols. Parameters
// that require grad and tensors that forward writes are state, other tensors constants. An operation that is not
// straight-line or not in the dispatcher is kUnsupported, and the message names it and its source line. The module is
// not changed.
Result<Captured> capture_torchscript(const torch::jit::Module& module, std::span<const at::Tensor> leaves);
Result<Captured> capture_torchscript(torch::jit::Function& function, std::span<const at::Tensor> leaves);

// Returns a hash of a tensor's dtype, sizes and elements, as stored in const inputs. The tensor is on the CPU.
std::string content_digest(const at::Tensor& tensor);

}  // namespace penstock::capture
