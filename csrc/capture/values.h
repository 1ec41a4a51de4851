// SPDX-License-Identifier: Apache-2.0
#pragma once
// The meanings of a TorchScript program's values read so far, and the graph that is built meanwhile.

#include <torch/csrc/jit/ir/ir.h>

#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "capture/bound.h"
#include "capture/builder.h"

namespace penstock::capture {

// "aten::add at model.py:12", for messages.
std::string where(const torch::jit::Node* node);

// Throws a Refusal with the reason why `node` cannot be captured.
[[noreturn]] void refuse(const torch::jit::Node* node, const std::string& why);

// Confined to the thread that reads. Throws Refusal.
class ProgramValues {
 public:
  // As for CaptureBuilder.
  ProgramValues(std::span<const at::Tensor> tensors, std::span<const std::optional<uint32_t>> leaf_indices)
      : builder_(tensors, leaf_indices) {}

  // Returns the meaning of a value, which must have been bound; find() returns null for an unbound value.
  const Bound& lookup(const torch::jit::Value* value) const;
  const Bound* find(const torch::jit::Value* value) const;

  std::vector<Bound> inputs_of(const torch::jit::Node* node) const;

  // Returns the graph values among `values`, including values in tuples and lists. Unbound values are left out.
  std::vector<graph::Argument> of_graph(const std::vector<const torch::jit::Value*>& values) const;

  void bind(const torch::jit::Value* value, Bound bound);

  // Appends `call` to the graph, and binds the results of `node` to the call's.
  void bind_call(const torch::jit::Node* node, graph::Node call);

  // Appends a call with positional arguments that represents `node`, and returns its one result.
  Bound emit(const torch::jit::Node* node, std::string op, std::vector<graph::Argument> arguments);

  CaptureBuilder& builder() { return builder_; }

 private:
  CaptureBuilder builder_;
  std::unordered_map<const torch::jit::Value*, Bound> bounds_;
};

}  // namespace penstock::capture
