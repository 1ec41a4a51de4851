// SPDX-License-Identifier: Apache-2.0
#include "graph/extract.h"

#include <algorithm>

#include "base/assert.h"
#include "graph/ir_text.h"
#include "graph/sha256.h"

namespace penstock::graph {
namespace {

// Raised whenever the same text could come to mean another value.
constexpr std::string_view kKeyVersion = "penstock-key 1\n";

std::string digest_of(std::string_view expression) {
  Sha256 hash;
  hash.update(kKeyVersion);
  hash.update(expression);
  return short_digest(hash);
}

std::string leaf_expression(const Input& input) {
  return "leaf " + std::to_string(input.leaf_index) + " " + std::string(name_of(input.dtype));
}

std::string const_expression(const Input& input) {
  std::string text = "const " + input.digest + " " + std::string(name_of(input.dtype)) + " [";
  for (const Dim& dim : input.sizes) text += std::to_string(std::get<int64_t>(dim)) + ",";
  return text + "]";
}

// The call with its producers' keys in place of the values, or nothing when one of them has no key.
std::string node_expression(const Node& node, const std::vector<std::string>& keys) {
  bool has_keys = true;
  const auto print_key = [&](std::string& text, ValueId value) {
    has_keys = has_keys && !keys[value].empty();
    text += '%' + keys[value];
  };
  std::string text = node.op + "(";
  for (const Argument& argument : node.args) {
    print_argument(text, argument, print_key);
    text += ',';
  }
  // The order of keywords says nothing.
  std::vector<const Keyword*> keywords;
  for (const Keyword& keyword : node.kwargs) keywords.push_back(&keyword);
  std::sort(keywords.begin(), keywords.end(), [](auto* a, auto* b) { return a->name < b->name; });
  for (const Keyword* keyword : keywords) {
    text += keyword->name + '=';
    print_argument(text, keyword->value, print_key);
    text += ',';
  }
  return has_keys ? text + ")" : std::string();
}

}  // namespace

std::vector<std::string> value_keys(const Graph& graph, std::string_view draws_of) {
  std::vector<std::string> keys(graph.value_names.size());
  for (const Input& input : graph.inputs) {
    if (input.kind == InputKind::kLeaf) keys[input.value] = digest_of(leaf_expression(input));
    if (input.kind == InputKind::kConst && !input.digest.empty())
      keys[input.value] = digest_of(const_expression(input));
    if (input.kind == InputKind::kInt && input.size_of)
      keys[input.value] = digest_of("size " + keys[input.size_of->tensor] + " " + std::to_string(input.size_of->dim));
  }
  size_t draw_count = 0;
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const Node& node = graph.nodes[i];
    std::string expression = node_expression(node, keys);
    const bool is_draw = i < graph.traits.size() && graph.traits[i].purity == Purity::kRandom;
    if (is_draw && !expression.empty())
      expression.append(" draw ")
          .append(std::to_string(draw_count++))
          .append(draws_of.empty() ? "" : " of ")
          .append(draws_of);
    if (expression.empty()) continue;
    for (size_t result = 0; result < node.results.size(); ++result)
      keys[node.results[result]] = digest_of(expression + " result " + std::to_string(result));
  }
  return keys;
}

Result<Graph> extract_prefix(const Graph& graph, const Plan& plan, std::string_view draws_of) {
  const std::vector<std::string> keys = value_keys(graph, draws_of);
  std::vector<bool> is_needed(graph.value_names.size());
  for (const ValueId value : plan.boundary) {
    PENSTOCK_ASSERT(value < is_needed.size(), "boundary value ", value, " of ", is_needed.size());
    is_needed[value] = true;
  }
  std::vector<bool> is_kept(graph.nodes.size());
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    const Node& node = graph.nodes[i];
    is_kept[i] = std::any_of(node.results.begin(), node.results.end(), [&](ValueId r) { return is_needed[r]; });
    if (is_kept[i]) for_each_operand(node, [&](ValueId operand) { is_needed[operand] = true; });
  }
  for (const Input& input : graph.inputs)
    if (input.size_of && is_needed[input.value]) is_needed[input.size_of->tensor] = true;

  // Values keep their ids while nodes are copied; a walk over the copied nodes makes the ids dense.
  std::vector<ValueId> new_ids(graph.value_names.size());
  Graph prefix;
  const auto rename = [&](ValueId& value) { value = new_ids[value]; };
  const auto define = [&](ValueId& value) {
    new_ids[value] = prefix.add_value(graph.value_names[value]);
    rename(value);
  };
  const auto rename_argument = [&](auto&& self, Argument& argument) -> void {
    if (auto* ref = std::get_if<ValueRef>(&argument.data)) rename(ref->id);
    if (auto* list = std::get_if<Argument::List>(&argument.data))
      for (Argument& item : *list) self(self, item);
  };
  for (Input input : graph.inputs) {
    if (!is_needed[input.value]) continue;
    PENSTOCK_ASSERT(input.kind != InputKind::kState, "the plan moves what reads ", input.source);
    if (input.kind == InputKind::kConst && input.digest.empty())
      return Fault{Errc::kUnsupported, "the constant " + input.source +
                                           " has no digest of its content, so values made from it have no key; add the "
                                           "digest to the graph"};
    define(input.value);
    if (input.size_of) rename(input.size_of->tensor);
    prefix.inputs.push_back(std::move(input));
  }
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    if (!is_kept[i]) continue;
    Node node = graph.nodes[i];
    for (Argument& argument : node.args) rename_argument(rename_argument, argument);
    for (Keyword& keyword : node.kwargs) rename_argument(rename_argument, keyword.value);
    for (ValueId& result : node.results) define(result);
    prefix.nodes.push_back(std::move(node));
    if (i < graph.traits.size()) prefix.traits.push_back(graph.traits[i]);
  }
  for (const ValueId value : plan.boundary) {
    PENSTOCK_ASSERT(!keys[value].empty(), "boundary value ", graph.value_names[value], " has no key");
    prefix.outputs.push_back({new_ids[value], keys[value]});
  }
  return prefix;
}

}  // namespace penstock::graph
