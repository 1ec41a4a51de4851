// SPDX-License-Identifier: Apache-2.0
#pragma once
// An Executor runs a graph over the tensors of a batch: boxed dispatch, no Python, no autograd, values freed at their
// last use. A repeated expression is computed once, and a constant expression once before the first batch (Folding).
// The results are bit-for-bit identical to eager torch's with the same number of threads. PrefixRest runs the trainer's
// part of a prefix if a worker has run only the exact part.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "graph/extract.h"
#include "graph/ir.h"
#include "runtime/kernel_settings.h"
#include "runtime/operator_call.h"

namespace penstock::runtime {

// The maximal memory that folding may keep for the life of an executor. Further nodes run for each batch, as if they
// were not constant.
inline constexpr size_t kFoldedBytesMax = size_t{64} << 20;

// The results of the nodes that depend only on constants, which run once, before the first batch: a resampling kernel,
// a mask of fixed size, the reciprocal of a deviation. Sizes of the batch are not constants.
struct Folding {
  Frame start;                  // the constants, and the values computed from them
  std::vector<bool> is_folded;  // by node
  size_t node_count = 0;        // of the folded nodes
  KernelSettings settings;      // with other settings the nodes could give other bits

  // Whether running the nodes on the calling thread would give exactly these values now.
  bool holds_now() const { return node_count > 0 && settings == KernelSettings::now(); }
};

// For an annotated graph without writes; `constants` is the frame that it starts from. Does not fold values that may
// share memory with an output, since the user may write to an output, nor nodes that fail: they fail in the run.
Folding fold_constants(const graph::Graph& graph, std::span<const OperatorCall> calls, const Frame& constants,
                       size_t bytes_max = kFoldedBytesMax);

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

// The trainer's part of a prefix if a worker has run only the nodes that are exact everywhere. Confined to one thread.
class PrefixRest {
 public:
  // `text` is the prefix as workers have it, and `constants` are its constants in order. Returns kUnsupported if a
  // worker could not send any value.
  static Result<PrefixRest> create(std::string_view text, std::vector<at::Tensor> constants);

  // The keys of the values that such a worker sends.
  const std::vector<std::string>& keys() const { return split_.keys; }

  // Returns the outputs of the prefix in order: received ones unchanged, the others computed by the calling thread.
  // `given` are the values of keys() in that order, and `leaves` the leaves of the batch.
  Result<std::vector<at::Tensor>> run(std::span<const at::Tensor> leaves, std::vector<at::Tensor> given);

 private:
  Result<void> prepare(size_t leaf_count, std::vector<graph::GivenForm> forms);

  graph::Graph prefix_;
  std::vector<at::Tensor> constants_;
  graph::PrefixSplit split_;
  size_t leaf_count_ = 0;
  std::vector<graph::GivenForm> forms_;  // that the executor was made for
  std::optional<Executor> executor_;
};

// Returns, by node, the values that may be freed after it: they are not read later, its unread results included.
// Outputs are not freed.
inline std::vector<std::vector<graph::ValueId>> last_uses(const graph::Graph& graph) {
  std::vector<bool> is_read_later(graph.value_names.size());
  for (const graph::Output& output : graph.outputs) is_read_later[output.value] = true;
  std::vector<std::vector<graph::ValueId>> uses(graph.nodes.size());
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    const auto note = [&](graph::ValueId value) {
      if (!is_read_later[value]) uses[i].push_back(value);
      is_read_later[value] = true;
    };
    for (const graph::ValueId result : graph.nodes[i].results) note(result);
    graph::for_each_operand(graph.nodes[i], note);
  }
  return uses;
}

}  // namespace penstock::runtime
