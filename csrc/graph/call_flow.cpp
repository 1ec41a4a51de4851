// SPDX-License-Identifier: Apache-2.0
#include "graph/call_flow.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <utility>

#include "base/assert.h"

namespace penstock::graph {
namespace {

constexpr std::string_view kSizeOperators = "size::";
using Call = std::optional<uint32_t>;

class FlowReader {
 public:
  FlowReader(const Graph& graph, std::span<const ValueSize> extents)
      : graph_(graph), extents_(extents), makers_(extents.size()), leaves_(extents.size()) {}

  CallFlow read() {
    for (const Input& input : graph_.inputs)
      if (input.kind == InputKind::kLeaf) leaves_[input.value] = input.leaf_index;
    for (const Node& node : graph_.nodes) read_node(node);
    for (const Output& output : graph_.outputs) hand(output.value, std::nullopt);
    CallFlow flow{.made_bytes = made_bytes(), .edges = {}};
    for (const auto& [edge, values] : handed_) {
      flow.edges.push_back(edge);
      for (const auto& [storage, bytes] : by_storage(values)) flow.edges.back().bytes += bytes;
    }
    return flow;
  }

 private:
  void read_node(const Node& node) {
    if (!node.group) return;
    if (!node.op.starts_with(kSizeOperators)) for_each_operand(node, [&](ValueId value) { hand(value, node.group); });
    for (const ValueId result : node.results) {
      makers_[result] = node.group;
      const ValueSize& extent = extents_[result];
      if (extent.storage != ValueSize::kNoStorage) allocators_.emplace(extent.storage, *node.group);
    }
  }

  void hand(ValueId value, Call reader) {
    const Call maker = makers_[value];
    const std::optional<uint32_t> leaf = leaves_[value];
    if (maker == reader || (!maker && !leaf)) return;
    const CallEdge edge{.source = maker, .target = reader, .leaf = leaf};
    auto found = std::find_if(handed_.begin(), handed_.end(), [&](const auto& item) { return item.first == edge; });
    if (found == handed_.end()) found = handed_.emplace(handed_.end(), edge, std::set<ValueId>{});
    found->second.insert(value);
  }

  std::map<uint32_t, int64_t> made_bytes() const {
    std::set<ValueId> read;
    for (const auto& [edge, values] : handed_)
      if (edge.source) read.insert(values.begin(), values.end());
    std::set<uint32_t> of_inputs;
    for (const Input& input : graph_.inputs) of_inputs.insert(extents_[input.value].storage);
    std::map<uint32_t, int64_t> made;
    for (const auto& [storage, bytes] : by_storage(read)) {
      const auto allocator = allocators_.find(storage);
      if (allocator != allocators_.end() && !of_inputs.contains(storage)) made[allocator->second] += bytes;
    }
    return made;
  }

  // Returns the bytes that values hold: of tensors that share memory, the largest counts.
  std::map<uint32_t, int64_t> by_storage(const std::set<ValueId>& values) const {
    std::map<uint32_t, int64_t> sizes;
    for (const ValueId value : values) {
      const ValueSize& extent = extents_[value];
      if (extent.storage == ValueSize::kNoStorage) continue;
      int64_t& bytes = sizes[extent.storage];
      bytes = std::max(bytes, extent.bytes);
    }
    return sizes;
  }

  const Graph& graph_;
  const std::span<const ValueSize> extents_;
  std::vector<Call> makers_;                     // by value
  std::vector<std::optional<uint32_t>> leaves_;  // by value
  std::map<uint32_t, uint32_t> allocators_;      // by storage, the call that made it
  std::vector<std::pair<CallEdge, std::set<ValueId>>> handed_;
};

}  // namespace

CallFlow call_flow(const Graph& graph, std::span<const ValueSize> extents) {
  PENSTOCK_ASSERT(extents.size() == graph.value_names.size());
  return FlowReader(graph, extents).read();
}

}  // namespace penstock::graph
