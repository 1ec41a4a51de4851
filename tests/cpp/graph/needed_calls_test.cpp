// SPDX-License-Identifier: Apache-2.0
#include "graph/needed_calls.h"

#include <gtest/gtest.h>

#include <set>

namespace penstock::graph {
namespace {

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
