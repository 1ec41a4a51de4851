// SPDX-License-Identifier: Apache-2.0
// The IR text, as a worker reads it of a trainer.
#include "graph/ir_text.h"

#include <unordered_set>

#include "fuzz_target.h"
#include "ir_text_edit.h"

namespace penstock::fuzz {

using namespace penstock::graph;

namespace {

Bytes bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

// A graph that has every kind of input and of argument.
Graph rich_graph() {
  Graph graph;
  const ValueId image = graph.add_value("x0");
  const ValueId mean = graph.add_value("c0");
  const ValueId weight = graph.add_value("p0");
  const ValueId batch = graph.add_value("s0");
  const std::string digest = "5feceb66ffc86f38d952786c6d696c79";
  graph.inputs = {
      {.value = image, .kind = InputKind::kLeaf, .dtype = Dtype::kUint8, .sizes = {"s0", int64_t{3}}},
      {.value = mean, .kind = InputKind::kConst, .source = "L['self'].mean", .sizes = {int64_t{1}}, .digest = digest},
      {.value = weight, .kind = InputKind::kState, .source = "w", .sizes = {}},
      {.value = batch, .kind = InputKind::kInt, .source = "n", .size_of = SizeOf{.tensor = image, .dim = 0}},
  };
  Node to{.op = "aten::to.dtype", .args = {{ValueRef{image}}, {Dtype::kFloat32}, {false}}};
  to.kwargs = {{"copy", {true}}, {"memory_format", {MemoryFormat::kChannelsLast}}, {"layout", {Layout::kStrided}}};
  to.results = {graph.add_value("v1")};
  to.group = 0;
  to.label = "x.float()";
  Node max{.op = "aten::max.dim", .args = {{ValueRef{to.results[0]}}, {int64_t{-1}}, {Real(1e-05)}}};
  max.args.push_back({Argument::List{{ValueRef{mean}}, {None{}}, {Argument::List{{std::string("\n\r\t\"\\\xff")}}}}});
  max.kwargs = {{"device", {Device{"cuda", 1}}}};
  max.results = {graph.add_value("v2"), graph.add_value("v3")};
  max.place = "model.py:13";
  graph.outputs = {{.value = max.results[0], .key = digest}, {.value = max.results[1], .key = ""}};
  graph.nodes = {std::move(to), std::move(max)};
  return graph;
}

void check_values(const Graph& graph) {
  std::unordered_set<std::string_view> names(graph.value_names.begin(), graph.value_names.end());
  expect(names.size() == graph.value_names.size(), "every value has a name of its own");
  std::vector<bool> is_defined(graph.value_names.size());
  const auto define = [&](ValueId value) {
    expect(value < is_defined.size() && !is_defined[value], "a value is defined once");
    is_defined[value] = true;
  };
  const auto use = [&](ValueId value) {
    expect(value < is_defined.size() && is_defined[value], "a value is defined before it is used");
  };
  std::unordered_set<uint32_t> leaves;
  for (const Input& input : graph.inputs) {
    if (input.kind == InputKind::kLeaf) expect(leaves.insert(input.leaf_index).second, "a leaf appears once");
    expect(input.sizes.size() <= kDimsMax, "dimensions are capped");
    if (input.size_of) {
      use(input.size_of->tensor);
      const auto is_it = [&](const Input& other) { return other.value == input.size_of->tensor; };
      const auto leaf = std::ranges::find_if(graph.inputs, is_it);
      expect(leaf != graph.inputs.end() && leaf->kind == InputKind::kLeaf, "a size is that of a leaf");
      expect(input.size_of->dim < leaf->sizes.size(), "a size is that of a dimension that is there");
    }
    define(input.value);
  }
  for (const Node& node : graph.nodes) {
    expect(node.args.size() + node.kwargs.size() <= kArgumentsMax, "arguments are capped");
    for_each_operand(node, use);
    for (const ValueId value : node.results) define(value);
    expect(!describe(node).empty(), "every node can be described");
  }
  for (const Output& output : graph.outputs) use(output.value);
}

}  // namespace

std::vector<Bytes> make_seeds() { return {bytes_of(print_graph({})), bytes_of(print_graph(rich_graph()))}; }

void mutate(Bytes& bytes, Choices& choices) {
  const bool is_of_words = choices.below(8) != 0;
  if (!is_of_words) edit_at_random(bytes);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (is_of_words || choices.below(2) == 0) bytes = bytes_of(edit_ir_text(text, choices));
}

void check(std::span<const std::byte> bytes) {
  const auto parsed = parse_graph({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  if (!parsed) {
    expect(!parsed.error().message.empty(), "an error says what is wrong");
    return;
  }
  const Graph& graph = parsed.value();
  expect(graph.inputs.size() <= kInputsMax && graph.nodes.size() <= kNodesMax, "statements are capped");
  expect(graph.outputs.size() <= kInputsMax && graph.value_names.size() <= kValuesMax, "values are capped");
  check_values(graph);
  const std::string printed = print_graph(graph);
  if (printed.size() > kTextBytesMax) return;  // escapes are longer than what they stand for
  const auto again = parse_graph(printed);
  expect(again && again.value() == graph, "a graph that is printed parses to the same graph");
  expect(print_graph(again.value()) == printed, "equal graphs are printed alike");
}

}  // namespace penstock::fuzz
