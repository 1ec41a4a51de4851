// SPDX-License-Identifier: Apache-2.0
#pragma once
// Minimum cut of a directed network, by push-relabel. Used for closure problems: "a may be taken only with b" is an
// infinite edge from a to b, a profit an edge from the source, a cost an edge to the sink.
//
// Highest-label push-relabel with exact initial labels, global relabelling and the gap rule, first phase only: the cut
// needs a maximal preflow, not a flow. Alternatives: on a chain of 10,000 operators with the profit at one end, Dinic's
// algorithm finds as many distinct path lengths, one breadth-first search each (bench/micro_graph.cpp has the figures
// for push-relabel); Hochbaum's pseudoflow is designed for closures, but needs more code than these graphs justify.

#include <cstdint>
#include <vector>

namespace penstock::graph {

// Thread-compatible.
class FlowNetwork {
 public:
  static constexpr uint32_t kSource = 0;
  static constexpr uint32_t kSink = 1;
  static constexpr int64_t kInfinite = int64_t{1} << 62;
  static constexpr int64_t kCapacityMax = int64_t{1} << 60;  // of a finite edge

  uint32_t add_node() { return node_count_++; }

  // Adds an edge with a capacity of 0..kCapacityMax or kInfinite. An edge from a node to itself is left out.
  void add_edge(uint32_t from, uint32_t to, int64_t capacity);

  // Returns, by node, whether it is on the source's side of the minimum cut. Of several minimum cuts it is the one with
  // the fewest nodes there, which is unique; so the result does not depend on the order of the edges. There must be no
  // path of infinite edges from source to sink.
  std::vector<bool> min_cut_source_side() const;

 private:
  struct Edge {
    uint32_t from;
    uint32_t to;
    int64_t capacity;
  };

  uint32_t node_count_ = 2;
  std::vector<Edge> edges_;
};

}  // namespace penstock::graph
