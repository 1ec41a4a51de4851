// SPDX-License-Identifier: Apache-2.0
#include "graph/call_flow.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graph/ir_text.h"

namespace penstock::graph {
namespace {

constexpr const char* kText =
    "penstock-ir 1\n"
    "input %x0 leaf 0 float32 [4]\n"
    "input %p0 state \"w\" float32 [4]\n"
    "%n = size::numel(%x0) group 0 \"view at m.py:1\"\n"
    "%a = aten::view(%x0, [%n]) group 0 \"view at m.py:1\"\n"
    "%b = aten::sin(%a) group 1 \"sin at m.py:2\"\n"
    "%c = aten::t(%b) group 2 \"t at m.py:3\"\n"
    "%d = aten::mul.Tensor(%c, %p0) group 3 \"mul at m.py:4\"\n"
    "output %d\n"
    "output %b\n";

std::vector<ValueSize> extents_of(const Graph& graph, const std::vector<std::pair<std::string, ValueSize>>& named) {
  std::vector<ValueSize> extents(graph.value_names.size());
  for (size_t value = 0; value < extents.size(); ++value)
    for (const auto& [name, extent] : named)
      if (graph.value_names[value] == name) extents[value] = extent;
  return extents;
}

TEST(CallFlow, NamesWhoHandsHowManyBytesToWhom) {
  const Graph graph = parse_graph(kText).value();
  const CallFlow flow = call_flow(
      graph, extents_of(graph, {{"x0", {16, 0}}, {"a", {16, 0}}, {"b", {32, 1}}, {"c", {24, 1}}, {"d", {8, 2}}}));
  const std::vector<CallEdge> expected{
      {.source = {}, .target = 0, .leaf = 0, .bytes = 16}, {.source = 0, .target = 1, .leaf = {}, .bytes = 16},
      {.source = 1, .target = 2, .leaf = {}, .bytes = 32}, {.source = 2, .target = 3, .leaf = {}, .bytes = 24},
      {.source = 3, .target = {}, .leaf = {}, .bytes = 8}, {.source = 1, .target = {}, .leaf = {}, .bytes = 32}};
  EXPECT_EQ(flow.edges, expected);
  EXPECT_EQ(flow.made_bytes, (std::map<uint32_t, int64_t>{{1, 32}, {3, 8}}))
      << "a view allocates nothing, and of two views the larger counts";
}

TEST(CallFlow, AValueOfUnknownSizeIsHandedOnWithoutBytes) {
  const Graph graph = parse_graph(kText).value();
  const CallFlow flow = call_flow(graph, extents_of(graph, {}));
  ASSERT_EQ(flow.edges.size(), 6u);
  for (const CallEdge& edge : flow.edges) EXPECT_EQ(edge.bytes, 0);
  EXPECT_TRUE(flow.made_bytes.empty());
}

using Kind = CallFault::Kind;

TEST(NeededCalls, AreThoseThatAreReadAndTheWholeOfTheirUnits) {
  // 1 reads 0; 2 writes to the result of 1, so they are one unit; 3 is on its own; 4 reads 2.
  NeededCalls calls(
      {{.unit = 0}, {.unit = 1, .reads = {0}}, {.unit = 1, .reads = {1}}, {.unit = 3}, {.unit = 4, .reads = {1}}}, {});
  EXPECT_FALSE(calls.need(4));
  EXPECT_EQ(calls.calls(), (std::set<uint32_t>{0, 1, 2, 4}));
}

TEST(NeededCalls, ACallThatMayNotRunIsNamedWithTheCallThatReadsIt) {
  NeededCalls calls({{.unit = 0}, {.unit = 1, .reads = {0}}, {.unit = 2, .reads = {1}}}, {0});
  EXPECT_EQ(calls.need(2), (CallFault{.kind = Kind::kForbidden, .call = 0, .reader = 1}));
  EXPECT_EQ(calls.need(0), (CallFault{.kind = Kind::kForbidden, .call = 0, .reader = {}}));
}

TEST(NeededCalls, AMemberOfAForbiddenUnitThatComputesNothingMayRun) {
  NeededCalls calls({{.unit = 0}, {.unit = 0, .is_droppable = true}, {.unit = 2, .reads = {1}}}, {0});
  const auto fault = calls.need(2);
  ASSERT_TRUE(fault);
  EXPECT_EQ(fault->call, 0u) << "but its unit, which it belongs to, may not";
  NeededCalls alone({{.unit = 0, .is_droppable = true}, {.unit = 1, .reads = {0}}}, {0});
  EXPECT_FALSE(alone.need(1));
  EXPECT_EQ(alone.calls(), (std::set<uint32_t>{0, 1}));
}

TEST(NeededCalls, AnIntermediateOfACallCannotBeRead) {
  NeededCalls calls({{.unit = 0}, {.unit = 1, .reads_intermediate = true, .reads = {0}}}, {});
  EXPECT_EQ(calls.need(1), (CallFault{.kind = Kind::kReadsIntermediate, .call = 1, .reader = {}}));
}

TEST(NeededCalls, TheEndsOfARegionStandAroundWhatRunsInIt) {
  NeededCalls calls({{.unit = 0}, {.unit = 1}, {.unit = 2}, {.unit = 3}, {.unit = 4}}, {});
  EXPECT_FALSE(calls.need(4));
  calls.need_region(0, 3);
  EXPECT_EQ(calls.calls(), (std::set<uint32_t>{4})) << "nothing of it runs";
  EXPECT_FALSE(calls.need(1));
  calls.need_region(0, 3);
  EXPECT_EQ(calls.calls(), (std::set<uint32_t>{0, 1, 3, 4}));
}

}  // namespace
}  // namespace penstock::graph
