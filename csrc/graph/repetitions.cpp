// SPDX-License-Identifier: Apache-2.0
#include "graph/repetitions.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <unordered_map>

#include "graph/ir_text.h"

namespace penstock::graph {
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
