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
graph::Graph rich_graph() {
  graph::Graph graph;
  const graph::ValueId image = graph.add_value("x0");
  const graph::ValueId mean = graph.add_value("c0");
  const graph::ValueId weight = graph.add_value("p0");
  const graph::ValueId batch = graph.add_value("s0");
  const std::string digest = "5feceb66ffc86f38d952786c6d696c79";
  graph.inputs = {
      {.value = image, .kind = graph::InputKind::kLeaf, .dtype = graph::Dtype::kUint8, .sizes = {"s0", int64_t{3}}},
      {.value = mean,
       .kind = graph::InputKind::kConst,
       .source = "L['self'].mean",
       .sizes = {int64_t{1}},
       .digest = digest},
      {.value = weight, .kind = graph::InputKind::kState, .source = "w", .sizes = {}},
      {.value = batch,
       .kind = graph::InputKind::kInt,
       .source = "n",
       .size_of = graph::SizeOf{.tensor = image, .dim = 0}},
  };
  graph::Node to{.op = "aten::to.dtype", .args = {{graph::ValueRef{image}}, {graph::Dtype::kFloat32}, {false}}};
  to.kwargs = {
      {"copy", {true}}, {"memory_format", {graph::MemoryFormat::kChannelsLast}}, {"layout", {graph::Layout::kStrided}}};
  to.results = {graph.add_value("v1")};
  to.group = 0;
  to.label = "x.float()";
  graph::Node max{.op = "aten::max.dim",
                  .args = {{graph::ValueRef{to.results[0]}}, {int64_t{-1}}, {graph::Real(1e-05)}}};
  max.args.push_back({graph::Argument::List{
      {graph::ValueRef{mean}}, {graph::None{}}, {graph::Argument::List{{std::string("\n\r\t\"\\\xff")}}}}});
  max.kwargs = {{"device", {graph::Device{"cuda", 1}}}};
  max.results = {graph.add_value("v2"), graph.add_value("v3")};
  max.place = "model.py:13";
  graph.outputs = {{.value = max.results[0], .key = digest}, {.value = max.results[1], .key = ""}};
  graph.nodes = {std::move(to), std::move(max)};
  return graph;
}

// One operator with as many arguments as there may be.
graph::Graph full_graph() {
  graph::Node node{.op = "aten::f"};
  for (size_t count = 0; count < graph::kArgumentsMax; ++count) node.args.push_back({int64_t{1}});
  graph::Graph graph;
  graph.nodes.push_back(std::move(node));
  return graph;
}

void check_values(const graph::Graph& graph) {
  std::unordered_set<std::string_view> names(graph.value_names.begin(), graph.value_names.end());
  expect(names.size() == graph.value_names.size(), "every value has a name of its own");
  std::vector<bool> is_defined(graph.value_names.size());
  const auto define = [&](graph::ValueId value) {
    expect(value < is_defined.size() && !is_defined[value], "a value is defined once");
    is_defined[value] = true;
  };
  const auto use = [&](graph::ValueId value) {
    expect(value < is_defined.size() && is_defined[value], "a value is defined before it is used");
  };
  std::unordered_set<uint32_t> leaves;
  for (const graph::Input& input : graph.inputs) {
    if (input.kind == graph::InputKind::kLeaf) expect(leaves.insert(input.leaf_index).second, "a leaf appears once");
    expect(input.sizes.size() <= graph::kDimsMax, "dimensions are capped");
    if (input.size_of) {
      use(input.size_of->tensor);
      const auto is_it = [&](const graph::Input& other) { return other.value == input.size_of->tensor; };
      const auto leaf = std::ranges::find_if(graph.inputs, is_it);
      expect(leaf != graph.inputs.end() && leaf->kind == graph::InputKind::kLeaf, "a size is that of a leaf");
      expect(input.size_of->dim < leaf->sizes.size(), "a size is that of a dimension that is there");
    }
    define(input.value);
  }
  for (const graph::Node& node : graph.nodes) {
    expect(node.args.size() + node.kwargs.size() <= graph::kArgumentsMax, "arguments are capped");
    for_each_operand(node, use);
    for (const graph::ValueId value : node.results) define(value);
    expect(!graph::describe(node).empty(), "every node can be described");
  }
  for (const graph::Output& output : graph.outputs) use(output.value);
}

}  // namespace

std::vector<Bytes> make_seeds() {
  return {bytes_of(graph::print_graph({})), bytes_of(graph::print_graph(rich_graph())),
          bytes_of(graph::print_graph(full_graph()))};
}

void mutate(Bytes& bytes, Choices& choices) {
  const bool is_of_words = choices.below(8) != 0;
  if (!is_of_words) edit_at_random(bytes);
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (is_of_words || choices.below(2) == 0) bytes = bytes_of(edit_ir_text(text, choices));
}

bool check(std::span<const std::byte> bytes) {
  const auto parsed = graph::parse_graph({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  if (!parsed) return is_refused(parsed.error().message);
  const graph::Graph& graph = parsed.value();
  expect(graph.inputs.size() <= graph::kInputsMax && graph.nodes.size() <= graph::kNodesMax, "statements are capped");
  expect(graph.outputs.size() <= graph::kInputsMax && graph.value_names.size() <= graph::kValuesMax,
         "values are capped");
  check_values(graph);
  const std::string printed = graph::print_graph(graph);
  if (printed.size() > graph::kTextBytesMax) return true;  // escapes are longer than what they stand for
  const auto again = graph::parse_graph(printed);
  expect(again && again.value() == graph, "a graph that is printed parses to the same graph");
  expect(graph::print_graph(again.value()) == printed, "equal graphs are printed alike");
  return true;
}

}  // namespace penstock::fuzz
