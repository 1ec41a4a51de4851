// SPDX-License-Identifier: Apache-2.0
#include "graph/extract.h"

#include <algorithm>
#include <utility>

#include "base/result.h"
#include "graph/ir_text.h"
#include "graph/sha256.h"

namespace penstock::graph {
namespace {

// Must be raised whenever the same text could represent another value.
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

// Returns the call with its producers' keys in place of the values; empty if one of them has no key.
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
  // The order of keywords has no meaning.
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

namespace {

// The nodes that are needed for some values, and their inputs.
struct Selection {
  std::vector<bool> is_needed;  // by value
  std::vector<bool> is_kept;    // by node
};

// Selects the nodes and inputs on which `wanted` depend; values in `is_given` have no dependencies.
Selection select_needed(const Graph& graph, std::span<const ValueId> wanted, const std::vector<bool>& is_given) {
  Selection found{std::vector<bool>(graph.value_names.size()), std::vector<bool>(graph.nodes.size())};
  for (const ValueId value : wanted) {
    PENSTOCK_ASSERT(value < found.is_needed.size(), "boundary value ", value, " of ", found.is_needed.size());
    found.is_needed[value] = true;
  }
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    const Node& node = graph.nodes[i];
    found.is_kept[i] = std::any_of(node.results.begin(), node.results.end(),
                                   [&](ValueId r) { return found.is_needed[r] && !is_given[r]; });
    if (found.is_kept[i]) for_each_operand(node, [&](ValueId operand) { found.is_needed[operand] = true; });
  }
  for (const Input& input : graph.inputs)
    if (input.size_of && found.is_needed[input.value]) found.is_needed[input.size_of->tensor] = true;
  return found;
}

// Copies a part of a graph. The ids of the copied values are dense.
class PartialCopy {
 public:
  explicit PartialCopy(const Graph& graph) : graph_(graph), new_ids_(graph.value_names.size()) {}

  Result<void> add_inputs(const std::vector<bool>& is_needed) {
    for (Input input : graph_.inputs) {
      if (!is_needed[input.value]) continue;
      PENSTOCK_ASSERT(input.kind != InputKind::kState, "the plan moves an operator that reads ", input.source);
      if (input.kind == InputKind::kConst && input.digest.empty())
        return Fault{Errc::kUnsupported,
                     "the constant " + input.source +
                         " has no content digest, so values computed from it have no key; add the digest to the graph"};
      add_input(std::move(input));
    }
    return {};
  }
  void add_input(Input input) {
    define(input.value);
    if (input.size_of) rename(input.size_of->tensor);
    part_.inputs.push_back(std::move(input));
  }
  // Values in `is_given` are still provided by their inputs, not by the nodes that compute them again.
  void add_nodes(const std::vector<bool>& is_kept, const std::vector<bool>& is_given) {
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      if (!is_kept[i]) continue;
      Node node = graph_.nodes[i];
      node.on.reset();
      for (Argument& argument : node.args) rename_argument(argument);
      for (Keyword& keyword : node.kwargs) rename_argument(keyword.value);
      for (ValueId& result : node.results) {
        if (is_given[result])
          result = part_.add_value(graph_.value_names[result] + "_again");
        else
          define(result);
      }
      part_.nodes.push_back(std::move(node));
      if (i < graph_.traits.size()) part_.traits.push_back(graph_.traits[i]);
    }
  }
  void add_output(ValueId value, std::string key) { part_.outputs.push_back({new_ids_[value], std::move(key)}); }

  Graph take() { return std::move(part_); }

 private:
  void rename(ValueId& value) const { value = new_ids_[value]; }
  void define(ValueId& value) {
    new_ids_[value] = part_.add_value(graph_.value_names[value]);
    rename(value);
  }
  void rename_argument(Argument& argument) const {
    if (auto* ref = std::get_if<ValueRef>(&argument.data)) rename(ref->id);
    if (auto* list = std::get_if<Argument::List>(&argument.data))
      for (Argument& item : *list) rename_argument(item);
  }

  const Graph& graph_;
  std::vector<ValueId> new_ids_;
  Graph part_;
};

}  // namespace

Result<Graph> extract_prefix(const Graph& graph, const Plan& plan, std::string_view draws_of,
                             std::string_view settings) {
  const std::vector<std::string> keys = value_keys(graph, draws_of);
  const std::vector<bool> none_given(graph.value_names.size());
  const Selection selection = select_needed(graph, plan.boundary, none_given);
  PartialCopy copy(graph);
  if (auto added = copy.add_inputs(selection.is_needed); !added) return added.error();
  copy.add_nodes(selection.is_kept, none_given);
  for (const ValueId value : plan.boundary) {
    PENSTOCK_ASSERT(!keys[value].empty(), "boundary value ", graph.value_names[value], " has no key");
    copy.add_output(value,
                    settings.empty() ? keys[value] : digest_of("under " + std::string(settings) + " " + keys[value]));
  }
  return copy.take();
}

std::vector<size_t> constants_of(const Graph& part, const Graph& whole) {
  std::vector<size_t> indices;
  for (const Input& wanted : part.inputs) {
    if (wanted.kind != InputKind::kConst) continue;
    size_t index = 0;
    for (const Input& input : whole.inputs) {
      if (input.kind != InputKind::kConst) continue;
      if (whole.value_names[input.value] == part.value_names[wanted.value]) break;
      ++index;
    }
    indices.push_back(index);
  }
  return indices;
}

PrefixSplit split_prefix(const Graph& prefix, const std::vector<bool>& is_exact) {
  PENSTOCK_ASSERT(prefix.traits.size() == prefix.nodes.size() && is_exact.size() == prefix.nodes.size());
  const size_t value_count = prefix.value_names.size();
  std::vector<bool> is_left(value_count);      // not computed by the front
  std::vector<bool> is_of_batch(value_count);  // depends on contents of the batch
  std::vector<bool> is_computed(value_count);  // and is more than a view of a leaf
  std::vector<const Node*> makers(value_count);
  std::vector<bool> is_tensor(value_count);
  for (const Input& input : prefix.inputs) is_of_batch[input.value] = input.kind == InputKind::kLeaf;
  for (size_t i = 0; i < prefix.nodes.size(); ++i) {
    bool reads_left = !is_exact[i];
    bool reads_batch = false;
    bool reads_computed = false;
    for_each_operand(prefix.nodes[i], [&](ValueId operand) {
      reads_left = reads_left || is_left[operand];
      reads_batch = reads_batch || is_of_batch[operand];
      reads_computed = reads_computed || is_computed[operand];
    });
    const Traits& traits = prefix.traits[i];
    for (size_t r = 0; r < prefix.nodes[i].results.size(); ++r) {
      const ValueId result = prefix.nodes[i].results[r];
      makers[result] = &prefix.nodes[i];
      is_left[result] = reads_left;
      is_of_batch[result] = reads_batch && traits.purity != Purity::kMetadata;
      is_computed[result] = is_of_batch[result] && (reads_computed || traits.aliases.empty());
      is_tensor[result] = r < traits.result_kinds.size() && traits.result_kinds[r] == ValueKind::kTensor;
    }
  }

  PrefixSplit split;
  const std::vector<std::string> keys = value_keys(prefix);
  std::vector<bool> is_seen(value_count);
  std::vector<ValueId> wanted;
  const auto hand_over = [&](ValueId value, std::string key) {
    if (is_seen[value]) return;
    is_seen[value] = true;
    split.handed_over.push_back(value);
    split.keys.push_back(std::move(key));
  };
  for (const Output& output : prefix.outputs)
    if (!is_left[output.value]) hand_over(output.value, output.key);
  for (const Output& output : prefix.outputs) {
    if (is_seen[output.value]) continue;
    is_seen[output.value] = true;
    wanted.push_back(output.value);
  }
  while (!wanted.empty()) {
    const ValueId value = wanted.back();
    wanted.pop_back();
    if (makers[value] == nullptr) continue;
    for_each_operand(*makers[value], [&](ValueId operand) {
      if (is_seen[operand]) return;
      if (!is_left[operand] && is_computed[operand] && is_tensor[operand] && !keys[operand].empty()) {
        // The outputs' keys identify the settings under which the values are computed.
        hand_over(operand, digest_of("part of " + prefix.outputs.front().key + " " + keys[operand]));
      } else {
        is_seen[operand] = true;
        wanted.push_back(operand);
      }
    });
  }
  return split;
}

Result<Graph> front_of(const Graph& prefix, const PrefixSplit& split) {
  const std::vector<bool> none_given(prefix.value_names.size());
  const Selection selection = select_needed(prefix, split.handed_over, none_given);
  PartialCopy copy(prefix);
  if (auto added = copy.add_inputs(selection.is_needed); !added) return added.error();
  copy.add_nodes(selection.is_kept, none_given);
  for (size_t i = 0; i < split.handed_over.size(); ++i) copy.add_output(split.handed_over[i], split.keys[i]);
  return copy.take();
}

Result<Graph> rest_of(const Graph& prefix, const PrefixSplit& split, std::span<const GivenForm> forms,
                      uint32_t first_leaf_index) {
  PENSTOCK_ASSERT(forms.size() == split.handed_over.size());
  std::vector<bool> is_given(prefix.value_names.size());
  for (const ValueId value : split.handed_over) is_given[value] = true;
  std::vector<ValueId> wanted;
  for (const Output& output : prefix.outputs)
    if (!is_given[output.value]) wanted.push_back(output.value);
  const Selection selection = select_needed(prefix, wanted, is_given);
  PartialCopy copy(prefix);
  if (auto added = copy.add_inputs(selection.is_needed); !added) return added.error();
  for (size_t i = 0; i < forms.size(); ++i) {
    Input input;
    input.value = split.handed_over[i];
    input.leaf_index = first_leaf_index + static_cast<uint32_t>(i);
    input.dtype = forms[i].dtype;
    for (uint32_t dim = 0; dim < forms[i].rank; ++dim)
      input.sizes.emplace_back("given_" + std::to_string(i) + "_" + std::to_string(dim));
    copy.add_input(std::move(input));
  }
  copy.add_nodes(selection.is_kept, is_given);
  for (const Output& output : prefix.outputs)
    if (!is_given[output.value]) copy.add_output(output.value, output.key);
  return copy.take();
}

}  // namespace penstock::graph
