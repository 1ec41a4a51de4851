// SPDX-License-Identifier: Apache-2.0
#include "graph/call_flow.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/result.h"
#include "graph/ir_text.h"

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

NeededCalls::NeededCalls(std::vector<CapturedCall> calls, std::set<uint32_t> forbidden_units)
    : calls_(std::move(calls)), forbidden_(std::move(forbidden_units)) {
  for (uint32_t place = 0; place < calls_.size(); ++place) {
    const CapturedCall& call = calls_[place];
    if (members_.size() <= call.unit) members_.resize(call.unit + 1);
    if (!call.is_droppable) members_[call.unit].push_back(place);
  }
}

std::optional<CallFault> NeededCalls::need(uint32_t call) {
  std::vector<std::pair<uint32_t, std::optional<uint32_t>>> pending{{call, std::nullopt}};
  while (!pending.empty()) {
    const auto [place, reader] = pending.back();
    pending.pop_back();
    PENSTOCK_ASSERT(place < calls_.size());
    if (needed_.contains(place)) continue;
    const CapturedCall& item = calls_[place];
    if (!item.is_droppable && forbidden_.contains(item.unit))
      return CallFault{.kind = CallFault::Kind::kForbidden, .call = place, .reader = reader};
    if (item.reads_intermediate)
      return CallFault{.kind = CallFault::Kind::kReadsIntermediate, .call = place, .reader = reader};
    needed_.insert(place);
    for (const uint32_t member : members_[item.unit]) pending.emplace_back(member, reader);
    for (const uint32_t read : item.reads) pending.emplace_back(read, place);
  }
  return std::nullopt;
}

void NeededCalls::need_region(uint32_t first, uint32_t last) {
  const auto inside = needed_.lower_bound(first);
  if (inside != needed_.end() && *inside < last) needed_.insert({first, last});
}

namespace {

bool is_repeatable(const Traits& traits) {
  return traits.writes.empty() && (traits.purity == Purity::kPure || traits.purity == Purity::kMetadata);
}

// A draw gives another value each time, but does not change its operands.
bool leaves_operands(const Traits& traits) {
  return traits.writes.empty() && (is_repeatable(traits) || traits.purity == Purity::kRandom);
}

// Returns the call as text, which identifies repetitions. Literals are printed exactly.
std::string expression(const Node& node) {
  const auto print_id = [](std::string& text, ValueId value) { text += '%' + std::to_string(value); };
  std::string text = node.op + "(";
  for (const Argument& argument : node.args) {
    print_argument(text, argument, print_id);
    text += ',';
  }
  for (const Keyword& keyword : node.kwargs) {
    text += keyword.name + '=';
    print_argument(text, keyword.value, print_id);
    text += ',';
  }
  return text;
}

void rename(Argument& argument, const std::vector<ValueId>& names) {
  if (auto* ref = std::get_if<ValueRef>(&argument.data)) ref->id = names[ref->id];
  if (auto* list = std::get_if<Argument::List>(&argument.data))
    for (Argument& item : *list) rename(item, names);
}

void rename(Traits& traits, const std::vector<ValueId>& names) {
  for (auto& [result, operand] : traits.aliases) operand = names[operand];
}

}  // namespace

Graph without_repetitions(Graph graph) {
  if (graph.traits.size() != graph.nodes.size() ||
      !std::all_of(graph.traits.begin(), graph.traits.end(), leaves_operands))
    return graph;
  std::vector<ValueId> names(graph.value_names.size());  // by value: the value that replaces it
  std::iota(names.begin(), names.end(), 0);
  std::unordered_map<std::string, size_t> first_calls;  // to their indices among the kept nodes
  size_t kept_count = 0;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    Node& node = graph.nodes[i];
    for (Argument& argument : node.args) rename(argument, names);
    for (Keyword& keyword : node.kwargs) rename(keyword.value, names);
    rename(graph.traits[i], names);
    if (is_repeatable(graph.traits[i])) {
      const auto [found, is_first] = first_calls.try_emplace(expression(node), kept_count);
      if (const Node& first = graph.nodes[found->second]; !is_first && first.results.size() == node.results.size()) {
        for (size_t r = 0; r < node.results.size(); ++r) names[node.results[r]] = first.results[r];
        continue;
      }
    }
    if (kept_count != i) {
      graph.nodes[kept_count] = std::move(node);
      graph.traits[kept_count] = std::move(graph.traits[i]);
    }
    ++kept_count;
  }
  graph.nodes.resize(kept_count);
  graph.traits.resize(kept_count);
  for (Output& output : graph.outputs) output.value = names[output.value];
  return graph;
}

}  // namespace penstock::graph
