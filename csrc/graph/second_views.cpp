// SPDX-License-Identifier: Apache-2.0
#include "graph/second_views.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

namespace penstock::graph {
namespace {

// Nodes of one call of the user's program move together, and the values between them are not visible elsewhere.
class SecondViews {
 public:
  SecondViews(const Graph& graph, const AliasSets& aliases, std::span<const ValueId> known_outside)
      : graph_(graph), aliases_(aliases), known_outside_(known_outside), calls_(graph.nodes.size()) {}

  std::vector<bool> find() {
    std::vector<bool> found(graph_.nodes.size(), false);
    find_shared_sets();
    if (shared_sets_.empty()) return found;
    follow_calls();
    for (size_t i = 0; i < graph_.nodes.size(); ++i)
      found[i] = std::ranges::any_of(graph_.nodes[i].results, [&](ValueId value) {
        const CallAndSet made{calls_[i], aliases_.find(value)};
        return !exempt_.contains(calls_[i]) && hands_on_.contains(made) &&
               (reads_.contains(made) || hands_on_.at(made).size() > 1);
      });
    return found;
  }

 private:
  using Call = size_t;  // its first node
  using CallAndSet = std::pair<Call, ValueId>;

  // Finds the alias sets of outputs of which the user has another value too.
  void find_shared_sets() {
    std::map<ValueId, std::set<ValueId>> had;
    for (const Input& input : graph_.inputs) had[aliases_.find(input.value)].insert(input.value);
    for (const ValueId value : known_outside_) had[aliases_.find(value)].insert(value);
    for (const Output& output : graph_.outputs) had[aliases_.find(output.value)].insert(output.value);
    for (const Output& output : graph_.outputs)
      if (const ValueId set = aliases_.find(output.value); had[set].size() > 1) shared_sets_.insert(set);
  }

  void follow_calls() {
    std::map<ValueId, Call> makers;
    std::map<uint32_t, Call> first_of_group;
    const auto hand_on = [&](ValueId value) {
      const ValueId set = aliases_.find(value);
      const auto maker = makers.find(value);
      if (maker != makers.end() && shared_sets_.contains(set)) hands_on_[{maker->second, set}].insert(value);
    };
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      const Node& node = graph_.nodes[i];
      calls_[i] = node.group ? first_of_group.try_emplace(*node.group, i).first->second : i;
      for_each_operand(node, [&](ValueId operand) {
        const auto maker = makers.find(operand);
        if (maker != makers.end() && maker->second == calls_[i]) return;
        hand_on(operand);
        reads_.insert({calls_[i], aliases_.find(operand)});
      });
      for (const ValueId result : node.results) makers[result] = calls_[i];
    }
    for (const Output& output : graph_.outputs) hand_on(output.value);
    for (const ValueId value : known_outside_)
      if (const auto maker = makers.find(value); maker != makers.end()) exempt_.insert(maker->second);
  }

  const Graph& graph_;
  const AliasSets& aliases_;
  const std::span<const ValueId> known_outside_;
  std::set<ValueId> shared_sets_;
  std::vector<Call> calls_;  // by node
  std::set<CallAndSet> reads_;
  std::map<CallAndSet, std::set<ValueId>> hands_on_;
  std::set<Call> exempt_;  // they make values that are known outside
};

}  // namespace

std::vector<bool> second_views(const Graph& graph, const AliasSets& aliases, std::span<const ValueId> known_outside) {
  return SecondViews(graph, aliases, known_outside).find();
}

}  // namespace penstock::graph
