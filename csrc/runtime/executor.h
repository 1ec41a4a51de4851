// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs a graph over the tensors of a batch: boxed dispatch, no Python, no autograd, values freed at their last use. A
// repeated expression is computed once, and a constant expression once before the first batch. The results are
// bit-for-bit identical to eager torch's with the same number of threads.

#include <ATen/core/Tensor.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "graph/ir.h"
#include "runtime/constant_folding.h"
#include "runtime/operator_call.h"

namespace penstock::runtime {

struct ExecutorOptions {
  bool allow_random = false;  // run operators that draw
  bool allow_state = false;   // run any operator, writing and unknown-effect ones too: for whole graphs, not prefixes
};

// Thread-compatible: runs may overlap, each on a separate thread. A graph that writes its constants (allow_state) must
// not overlap with itself. The caller sets the number of threads that an operator uses (at::set_num_threads).
class Executor {
 public:
  // `constants` are the graph's const inputs, and with allow_state its state inputs, in the order of its inputs.
  // Returns kUnsupported for a graph that a worker must not or cannot run, kMismatch for constants that do not match
  // the graph.
  static Result<Executor> create(graph::Graph graph, std::vector<at::Tensor> constants,
                                 const ExecutorOptions& options = {});

  // Whether run() can take these leaves: tensors of the flattened batch, by leaf index. Returns kMismatch with the
  // first difference in presence, device, dtype or shape.
  Result<void> accepts(std::span<const at::Tensor> leaves) const;

  // Returns the graph's outputs in order. Outputs may be views of the leaves or of each other. Random draws use torch's
  // CPU generator. With a `seed`, they are made as if the generator had just been seeded with it, and its state does
  // not change.
  Result<std::vector<at::Tensor>> run(std::span<const at::Tensor> leaves, std::optional<uint64_t> seed = {}) const;

  // Whether a run draws random numbers.
  bool draws() const { return draws_; }

  // The graph that create() was given.
  const graph::Graph& graph() const { return graph_; }

  // The number of nodes that a run does not have to call.
  size_t saved_node_count() const { return graph_.nodes.size() - calls_.size() + folding_.node_count; }

 private:
  struct LeafShape {
    size_t input_index;
    std::vector<int64_t> symbols;  // by dim: index of its symbol, or -1 for a known size
  };

  Executor() = default;
  Result<void> prepare(std::vector<at::Tensor> constants, const ExecutorOptions& options);
  Result<void> bind_inputs(std::vector<at::Tensor> constants);
  Result<void> check_effects(const ExecutorOptions& options) const;
  Result<void> check_leaf(const LeafShape& leaf, const at::Tensor& tensor, std::span<int64_t> symbols) const;

  graph::Graph graph_;
  std::vector<LeafShape> leaves_;
  size_t symbol_count_ = 0;
  Frame start_;                                         // constants in place, the rest empty
  std::vector<OperatorCall> calls_;                     // of the graph without its repetitions
  std::vector<std::vector<graph::ValueId>> last_uses_;  // by call: values that are not read later
  std::vector<graph::ValueId> outputs_;
  Folding folding_;
  bool draws_ = false;
};

// Checks that `tensor` is the constant that `input` describes: dtype, sizes and, if present, digest.
Result<void> check_constant(const graph::Input& input, const at::Tensor& tensor);

}  // namespace penstock::runtime
