// SPDX-License-Identifier: Apache-2.0
// The minimum cut against every closure there is.

#include "graph/min_cut.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <random>

namespace penstock::graph {
namespace {

uint32_t seed() {
  const char* given = std::getenv("PENSTOCK_TEST_SEED");
  return given != nullptr ? static_cast<uint32_t>(std::strtoul(given, nullptr, 10)) : 20240607;
}

// A closure problem: taking item i gains gains[i] (or costs, when negative); needs[i] lists what it needs.
struct Closure {
  std::vector<int64_t> gains;
  std::vector<std::vector<uint32_t>> needs;

  bool is_closed(uint32_t taken) const {
    for (uint32_t i = 0; i < gains.size(); ++i)
      for (const uint32_t need : needs[i])
        if ((taken >> i & 1) != 0 && (taken >> need & 1) == 0) return false;
    return true;
  }

  int64_t gain(uint32_t taken) const {
    int64_t sum = 0;
    for (uint32_t i = 0; i < gains.size(); ++i) sum += (taken >> i & 1) != 0 ? gains[i] : 0;
    return sum;
  }

  uint32_t solve() const {
    FlowNetwork network;
    for (size_t i = 0; i < gains.size(); ++i) network.add_node();
    for (uint32_t i = 0; i < gains.size(); ++i) {
      if (gains[i] > 0) network.add_edge(FlowNetwork::kSource, i + 2, gains[i]);
      if (gains[i] < 0) network.add_edge(i + 2, FlowNetwork::kSink, -gains[i]);
      for (const uint32_t need : needs[i]) network.add_edge(i + 2, need + 2, FlowNetwork::kInfinite);
    }
    const auto side = network.min_cut_source_side();
    uint32_t taken = 0;
    for (uint32_t i = 0; i < gains.size(); ++i) taken |= side[i + 2] ? 1u << i : 0;
    return taken;
  }
};

TEST(MinCut, IsTheSmallestOfTheBestClosures) {
  std::mt19937 random(seed());
  RecordProperty("seed", static_cast<int>(seed()));
  for (int round = 0; round < 3'000; ++round) {
    Closure closure;
    const uint32_t count = 1 + random() % 10;
    for (uint32_t i = 0; i < count; ++i) {
      closure.gains.push_back(static_cast<int64_t>(random() % 9) - 4);
      std::vector<uint32_t> needs;
      for (uint32_t j = 0; j < count; ++j)  // cycles too: a group may need another that needs it
        if (j != i && random() % 4 == 0) needs.push_back(j);
      closure.needs.push_back(needs);
    }
    int64_t best = 0;
    uint32_t common = ~0u;  // the common part of all best closures: the smallest one
    for (uint32_t taken = 0; taken < 1u << count; ++taken) {
      if (!closure.is_closed(taken)) continue;
      const int64_t gain = closure.gain(taken);
      if (gain > best) common = ~0u;
      best = std::max(best, gain);
      if (gain == best) common &= taken;
    }
    const uint32_t taken = closure.solve();
    ASSERT_TRUE(closure.is_closed(taken)) << "seed " << seed() << ", round " << round;
    ASSERT_EQ(closure.gain(taken), best) << "seed " << seed() << ", round " << round;
    ASSERT_EQ(taken, common) << "seed " << seed() << ", round " << round;
  }
}

// General networks, with finite edges between the nodes: the value of the cut against every cut there is.
TEST(MinCut, HasTheSmallestCapacityOfAllCuts) {
  std::mt19937 random(seed() + 1);
  for (int round = 0; round < 3'000; ++round) {
    FlowNetwork network;
    struct Edge {
      uint32_t from, to;
      int64_t capacity;
    };
    std::vector<Edge> edges;
    const uint32_t count = 2 + random() % 8;
    for (uint32_t i = 2; i < count; ++i) network.add_node();
    for (uint32_t i = 0; i < 3 * count; ++i) {
      const Edge edge{static_cast<uint32_t>(random() % count), static_cast<uint32_t>(random() % count),
                      static_cast<int64_t>(random() % 6)};
      edges.push_back(edge);
      network.add_edge(edge.from, edge.to, edge.capacity);
    }
    const auto capacity = [&](const auto& on_source_side) {
      int64_t sum = 0;
      for (const Edge& edge : edges)
        if (on_source_side(edge.from) && !on_source_side(edge.to)) sum += edge.capacity;
      return sum;
    };
    int64_t best = INT64_MAX;
    for (uint32_t side = 0; side < 1u << count; ++side)
      if ((side & 3) == 1) best = std::min(best, capacity([&](uint32_t node) { return (side >> node & 1) != 0; }));
    const auto side = network.min_cut_source_side();
    ASSERT_TRUE(side[FlowNetwork::kSource]);
    ASSERT_FALSE(side[FlowNetwork::kSink]);
    ASSERT_EQ(capacity([&](uint32_t node) { return side[node]; }), best)
        << "seed " << seed() + 1 << ", round " << round;
  }
}

TEST(MinCut, DoesNotDependOnTheOrderOfTheEdges) {
  FlowNetwork forward;
  FlowNetwork backward;
  const uint32_t a = forward.add_node();
  const uint32_t b = forward.add_node();
  backward.add_node();
  backward.add_node();
  forward.add_edge(FlowNetwork::kSource, a, 3);
  forward.add_edge(a, b, FlowNetwork::kInfinite);
  forward.add_edge(b, FlowNetwork::kSink, 3);
  backward.add_edge(b, FlowNetwork::kSink, 3);
  backward.add_edge(a, b, FlowNetwork::kInfinite);
  backward.add_edge(FlowNetwork::kSource, a, 3);
  EXPECT_EQ(forward.min_cut_source_side(), backward.min_cut_source_side());
  EXPECT_FALSE(forward.min_cut_source_side()[a]);  // a tie moves nothing
}

TEST(MinCut, NodesWithoutEdgesAndEmptyNetworksAreNoTrouble) {
  FlowNetwork network;
  EXPECT_EQ(network.min_cut_source_side(), (std::vector<bool>{true, false}));
  const uint32_t lonely = network.add_node();
  network.add_edge(lonely, lonely, 5);
  EXPECT_FALSE(network.min_cut_source_side()[lonely]);
}

TEST(MinCut, EdgesAtTheCapsDoNotOverflow) {
  FlowNetwork network;
  const uint32_t gate = network.add_node();
  for (int i = 0; i < 64; ++i) {
    const uint32_t node = network.add_node();
    network.add_edge(FlowNetwork::kSource, node, FlowNetwork::kInfinite);
    network.add_edge(node, gate, FlowNetwork::kInfinite);
  }
  network.add_edge(gate, FlowNetwork::kSink, FlowNetwork::kCapacityMax);
  const auto side = network.min_cut_source_side();
  EXPECT_TRUE(side[gate]);
  EXPECT_FALSE(side[FlowNetwork::kSink]);
}

// The case that makes searches for augmenting paths slow: all of the gain at one end of a chain, a cost at each link.
TEST(MinCut, ChainOfTenThousandIsNoWorkOfMinutes) {
  constexpr uint32_t kCount = 10'000;
  FlowNetwork network;
  for (uint32_t i = 0; i < kCount; ++i) {
    const uint32_t node = network.add_node();
    network.add_edge(node, FlowNetwork::kSink, 1);
    if (i > 0) network.add_edge(node, node - 1, FlowNetwork::kInfinite);
  }
  network.add_edge(FlowNetwork::kSource, kCount + 1, kCount + 1);
  const auto start = std::chrono::steady_clock::now();
  const auto side = network.min_cut_source_side();
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(1));  // paths one by one: hours
  EXPECT_TRUE(side[2]);
}

}  // namespace
}  // namespace penstock::graph
