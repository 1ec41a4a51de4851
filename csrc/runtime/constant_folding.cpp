// SPDX-License-Identifier: Apache-2.0
#include "runtime/constant_folding.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <unordered_set>

#include "graph/alias_sets.h"
#include "graph/effects.h"
#include "runtime/execution_guard.h"

namespace penstock::runtime {
namespace {

using graph::ValueId;

// Returns, by node, whether its results are the same for every batch and do not share memory with an output.
std::vector<bool> foldable_nodes(const graph::Graph& graph) {
  graph::AliasSets aliases(graph.value_names.size());
  for (const graph::Traits& traits : graph.traits)
    for (const auto& [result, operand] : traits.aliases) aliases.unite(result, operand);
  std::vector<bool> is_given_out(graph.value_names.size());  // by alias set
  for (const graph::Output& output : graph.outputs) is_given_out[aliases.find(output.value)] = true;

  const auto verdicts = graph::analyse_effects(graph, {.is_whole_program = false});
  std::vector<bool> is_foldable(graph.nodes.size());
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const auto& results = graph.nodes[i].results;
    is_foldable[i] = verdicts[i].movable && verdicts[i].level == graph::Level::kConst &&
                     std::none_of(results.begin(), results.end(),
                                  [&](ValueId result) { return is_given_out[aliases.find(result)]; });
  }
  return is_foldable;
}

// Counts the memory of values once, however many views of it there are.
class StorageBytes {
 public:
  size_t add(const c10::IValue& value) {
    if (value.isTensor()) return add_tensor(value.toTensor());
    size_t bytes = 0;
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) bytes += add_tensor(tensor);
    return bytes;
  }

 private:
  size_t add_tensor(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.has_storage()) return 0;
    return seen_.insert(tensor.storage().unsafeGetStorageImpl()).second ? tensor.storage().nbytes() : 0;
  }

  std::unordered_set<const c10::StorageImpl*> seen_;
};

}  // namespace

Folding fold_constants(const graph::Graph& graph, std::span<const OperatorCall> calls, const Frame& constants,
                       size_t bytes_max) {
  const ExecutionGuard guard;
  Folding folding{constants, foldable_nodes(graph), 0, KernelSettings::now()};
  StorageBytes storages;
  for (const c10::IValue& constant : constants) storages.add(constant);
  std::vector<bool> is_missing(constants.size());  // would be constant, but was not folded
  size_t folded_bytes = 0;
  bool is_full = false;
  c10::Stack stack;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const graph::Node& node = graph.nodes[i];
    bool is_ready = folding.is_folded[i] && !is_full;
    graph::for_each_operand(node, [&](ValueId operand) { is_ready = is_ready && !is_missing[operand]; });
    if (is_ready && calls[i].run(folding.start, stack)) {
      for (const ValueId result : node.results) folded_bytes += storages.add(folding.start[result]);
      is_full = folded_bytes > bytes_max;
      if (!is_full) {
        ++folding.node_count;
        continue;
      }
    }
    folding.is_folded[i] = false;
    for (const ValueId result : node.results) {
      folding.start[result] = c10::IValue();
      is_missing[result] = true;
    }
  }
  // Values that only folded nodes read are no longer needed.
  std::vector<bool> is_read(constants.size());
  for (const graph::Output& output : graph.outputs) is_read[output.value] = true;
  for (size_t i = 0; i < graph.nodes.size(); ++i)
    if (!folding.is_folded[i])
      graph::for_each_operand(graph.nodes[i], [&](ValueId operand) { is_read[operand] = true; });
  for (size_t value = 0; value < constants.size(); ++value)
    if (!is_read[value]) folding.start[value] = c10::IValue();
  return folding;
}

}  // namespace penstock::runtime
