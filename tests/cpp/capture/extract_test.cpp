// SPDX-License-Identifier: Apache-2.0
// Prefixes and keys.

#include "graph/extract.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "capture/capture.h"
#include "graph/effects.h"
#include "graph/ir_text.h"

namespace penstock::capture {
namespace {

graph::Graph load(std::string_view text) {
  auto parsed = graph::parse_graph(text);
  EXPECT_TRUE(parsed) << parsed.error().message;
  if (!parsed) return {};
  annotate(parsed.value());
  return std::move(parsed).value();
}

std::string key_of(const graph::Graph& graph, std::string_view name) {
  const auto keys = graph::value_keys(graph);
  const auto found = std::find(graph.value_names.begin(), graph.value_names.end(), name);
  EXPECT_NE(found, graph.value_names.end()) << name;
  return keys[static_cast<size_t>(found - graph.value_names.begin())];
}

constexpr std::string_view kBase = R"(penstock-ir 1
input %x leaf 0 uint8 [s0, 3]
input %c const "mean" float32 [3] digest "000102030405060708090a0b0c0d0e0f"
input %n int "n" = %x.size(0)
%f = aten::to.dtype(%x, dtype:float32) group 0 "float"
%g = aten::sub.Tensor(%f, %c, alpha=1) group 1 "sub"
%y = aten::reshape(%g, [%n, -1]) group 2 "reshape"
output %y
)";

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST(Keys, NamesLabelsGroupsLinesAndOtherNodesDoNotEnter) {
  const std::string other = R"(penstock-ir 1
input %unrelated leaf 4 float32 [2]
input %batch leaf 0 uint8 [8, 3]
input %w state "weights" float32 [3]
input %rows int "rows" = %batch.size(0)
input %mu const "another.mean" float32 [3] digest "000102030405060708090a0b0c0d0e0f"
%noise = aten::neg(%unrelated)
%as_float = aten::to.dtype(%batch, dtype:float32)
%zero_mean = aten::sub.Tensor(%as_float, %mu, alpha=1) group 9 "x - mu" at "another.py:3"
%out = aten::reshape(%zero_mean, [%rows, -1])
output %out
)";
  EXPECT_EQ(key_of(load(kBase), "y"), key_of(load(other), "out"));
}

TEST(Keys, AnyChangeOfTheExpressionGivesAnotherKey) {
  std::set<std::string> keys{key_of(load(kBase), "y")};
  size_t count = 1;
  const std::string base(kBase);
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{{"leaf 0", "leaf 1"},
                                                        {"uint8", "int8"},
                                                        {"0001020304", "ff01020304"},
                                                        {"float32 [3] digest", "float32 [1, 3] digest"},
                                                        {"mean\" float32", "mean\" float64"},
                                                        {"dtype:float32", "dtype:float64"},
                                                        {"alpha=1", "alpha=2"},
                                                        {"alpha=1", "alpha=1.0"},
                                                        {"aten::sub", "aten::add"},
                                                        {"%f, %c", "%c, %f"},
                                                        {"[%n, -1]", "[%n, 3]"},
                                                        {"[%n, -1]", "[8, -1]"},
                                                        {"%x.size(0)", "%x.size(1)"}}) {
    keys.insert(key_of(load(replaced(base, from, to)), "y"));
    EXPECT_EQ(keys.size(), ++count) << from << " -> " << to;
  }
}

TEST(Keys, ResultsOfOneNodeDiffer) {
  const graph::Graph graph = load("penstock-ir 1\ninput %x leaf 0 float32 [2]\n%a, %b = aten::max.dim(%x, 0)\n");
  EXPECT_NE(key_of(graph, "a"), key_of(graph, "b"));
}

TEST(Keys, OrderOfKeywordsSaysNothing) {
  const char* text =
      "penstock-ir 1\ninput %x leaf 0 float32 [2]\n%a = aten::zeros_like(%x, dtype=dtype:int64, pin_memory=false)\n";
  EXPECT_EQ(
      key_of(load(text), "a"),
      key_of(load(replaced(text, "dtype=dtype:int64, pin_memory=false", "pin_memory=false, dtype=dtype:int64")), "a"));
}

TEST(Keys, TwoDrawsAreTwoValues) {
  const graph::Graph graph =
      load("penstock-ir 1\ninput %x leaf 0 float32 [2]\n%a = aten::bernoulli(%x)\n%b = aten::bernoulli(%x)\n");
  EXPECT_NE(key_of(graph, "a"), key_of(graph, "b"));
}

TEST(Keys, DrawsOfTwoGraphsAreTwoValues) {
  const graph::Graph graph =
      load("penstock-ir 1\ninput %x leaf 0 float32 [2]\n%a = aten::neg(%x)\n%b = aten::bernoulli(%a)\n");
  const auto first = graph::value_keys(graph, "first");
  const auto second = graph::value_keys(graph, "second");
  EXPECT_EQ(first[1], second[1]);
  EXPECT_NE(first[2], second[2]);
  EXPECT_NE(first[2], graph::value_keys(graph)[2]);
}

TEST(Keys, WhatDependsOnStateHasNone) {
  const graph::Graph graph = load(
      "penstock-ir 1\ninput %x leaf 0 float32 [2]\ninput %p state \"p\" float32 [2]\ninput %k int \"k\"\n"
      "%a = aten::add.Tensor(%x, %p)\n%b = aten::neg(%a)\n%d = aten::add.Scalar(%x, %k)\n");
  for (const char* name : {"p", "k", "a", "b", "d"}) EXPECT_EQ(key_of(graph, name), "") << name;
}

// The key's text is part of what trainers and workers of one version agree on; this fails when it changes by accident.
TEST(Keys, AreStable) {
  EXPECT_EQ(key_of(load("penstock-ir 1\ninput %x leaf 0 uint8 [2]\n"), "x"),
            "3b52347388b7f72784da74261aa735d2");  // sha256 of "penstock-key 1\nleaf 0 uint8"
}

graph::Plan boundary_plan(const graph::Graph& graph, const std::vector<std::string>& names) {
  graph::Plan plan;
  for (const std::string& name : names)
    plan.boundary.push_back(static_cast<graph::ValueId>(
        std::find(graph.value_names.begin(), graph.value_names.end(), name) - graph.value_names.begin()));
  return plan;
}

TEST(Extract, KeepsWhatTheBoundaryNeedsAndNothingElse) {
  const graph::Graph graph = load(R"(penstock-ir 1
input %x leaf 0 uint8 [s0, 3]
input %z leaf 2 float32 [s0]
input %unused const "unused" float32 [3]
input %c const "mean" float32 [3] digest "000102030405060708090a0b0c0d0e0f"
input %d const "scale" float32 [3] digest "ff0102030405060708090a0b0c0d0e0f"
input %p state "p" float32 [3]
input %n int "n" = %z.size(0)
%dead = aten::neg(%z)
%f = aten::to.dtype(%x, dtype:float32) group 0 "float"
%k = aten::sub.Tensor(%f, %p)
%s = aten::mul.Tensor(%f, %d)
%g = aten::sub.Tensor(%s, %c)
%h = aten::reshape(%g, [%n, -1])
output %k
)");
  const auto prefix = graph::extract_prefix(graph, boundary_plan(graph, {"f", "h"}));
  ASSERT_TRUE(prefix) << prefix.error().message;
  const auto keys = graph::value_keys(graph);
  EXPECT_EQ(graph::print_graph(prefix.value()), R"(penstock-ir 1
input %x leaf 0 uint8 [s0, 3]
input %z leaf 2 float32 [s0]
input %c const "mean" float32 [3] digest "000102030405060708090a0b0c0d0e0f"
input %d const "scale" float32 [3] digest "ff0102030405060708090a0b0c0d0e0f"
input %n int "n" = %z.size(0)
%f = aten::to.dtype(%x, dtype:float32) group 0 "float"
%s = aten::mul.Tensor(%f, %d)
%g = aten::sub.Tensor(%s, %c)
%h = aten::reshape(%g, [%n, -1])
output %f key ")" + key_of(graph, "f") + "\"\noutput %h key \"" +
                                                    key_of(graph, "h") + "\"\n");
  // The same values have the same keys in the prefix itself.
  EXPECT_EQ(key_of(prefix.value(), "h"), key_of(graph, "h"));
}

TEST(Extract, ConstantWithoutDigestIsRefused) {
  const graph::Graph graph = load(R"(penstock-ir 1
input %x leaf 0 float32 [3]
input %c const "self.mean" float32 [3]
%a = aten::sub.Tensor(%x, %c)
)");
  const auto prefix = graph::extract_prefix(graph, boundary_plan(graph, {"a"}));
  ASSERT_FALSE(prefix);
  EXPECT_EQ(prefix.error().code, Errc::kUnsupported);
  EXPECT_NE(prefix.error().message.find("self.mean"), std::string::npos);
}

TEST(Extract, PlanThatMovesNothingGivesAnEmptyGraph) {
  const auto prefix = graph::extract_prefix(load(kBase), {});
  ASSERT_TRUE(prefix);
  EXPECT_EQ(graph::print_graph(prefix.value()), "penstock-ir 1\n");
}

}  // namespace
}  // namespace penstock::capture
