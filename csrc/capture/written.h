// SPDX-License-Identifier: Apache-2.0
#pragma once
// A TorchScript program written out as it was read: branches taken, loops unrolled, one node for each that the reader
// met. It is a program again once some of its nodes are taken out, over the module's own parameters.

#include <torch/csrc/jit/ir/ir.h>

#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/result.h"
#include "graph/ir.h"

namespace penstock::capture {

// "aten::mul at model.py:12:8"
std::string place_of(const torch::jit::Node* node);

// A place without its operator: " at file:line:column".
std::string line_of(const std::string& place);

// Confined to the thread that reads; afterwards thread-compatible.
class WrittenProgram {
 public:
  // Takes the inputs of `program`.
  explicit WrittenProgram(const torch::jit::Graph& program);

  // Appends a copy of `node`, with its blocks. From here on, readers of the results of `node` read those of the copy.
  void append(const torch::jit::Node* node);

  // From here on readers of `value` read the present value of `other`, or a number.
  void stand_in(const torch::jit::Value* value, const torch::jit::Value* other);
  void stand_in(const torch::jit::Value* value, int64_t number);
  void stand_in_all(const std::vector<const torch::jit::Value*>& values,
                    const std::vector<const torch::jit::Value*>& others);  // at once

  // Says that `value` is, as it stands now, the graph's `id`. The first to be it counts.
  void name(graph::ValueId id, const torch::jit::Value* value);

  // The program's results.
  void finish(const torch::jit::Graph& program);

  // The program that takes `values` as further arguments, after its own, and leaves out the nodes that compute them.
  // kUnsupported, naming a node of `gone`, when that node cannot be left out.
  Result<std::shared_ptr<torch::jit::Graph>> without(const std::vector<graph::ValueId>& values,
                                                     const std::vector<graph::ValueId>& gone) const;

  // Where in the source the values are made, and where anything is.
  std::set<std::string> lines(const std::vector<graph::ValueId>& values) const;
  std::set<std::string> lines() const;

  // The program that returns `values` as one tuple and does nothing else.
  Result<std::shared_ptr<torch::jit::Graph>> computing(const std::vector<graph::ValueId>& values) const;

 private:
  using ValueMap = std::unordered_map<const torch::jit::Value*, torch::jit::Value*>;

  torch::jit::Value* copy_of(const torch::jit::Value* value) const;
  // A copy of the program so far, and where its values are.
  std::shared_ptr<torch::jit::Graph> duplicate(ValueMap& values) const;
  Result<std::vector<torch::jit::Value*>> find(const std::vector<graph::ValueId>& ids, const ValueMap& values) const;

  std::shared_ptr<torch::jit::Graph> written_;
  ValueMap copies_;  // by value of the program that is read
  std::unordered_map<graph::ValueId, torch::jit::Value*> named_;
};

}  // namespace penstock::capture
