// SPDX-License-Identifier: Apache-2.0
#include "graph/min_cut.h"

#include <algorithm>

#include "base/result.h"

namespace penstock::graph {
namespace {

// Excess can be the sum of many infinite edges.
__extension__ using Excess = __int128;

// A maximal preflow gives the smallest set that reaches the sink, but this function needs the smallest set reached from
// the source. So the network is solved backwards: every edge is reversed, and flow is pushed from the sink.
class PushRelabel {
 public:
  struct Arc {
    uint32_t to;
    uint32_t reverse;  // index of the opposite arc
    int64_t residual;
  };

  template <typename Edges>
  PushRelabel(uint32_t node_count, const Edges& edges)
      : node_count_(node_count),
        first_arc_(node_count + 1, 0),
        labels_(node_count, 0),
        excess_(node_count, 0),
        next_arc_(node_count, 0),
        active_(node_count),
        at_label_(node_count),
        place_(node_count, 0) {
    for (const auto& edge : edges) {
      ++first_arc_[edge.from + 1];
      ++first_arc_[edge.to + 1];
    }
    for (uint32_t node = 0; node < node_count; ++node) first_arc_[node + 1] += first_arc_[node];
    arcs_.resize(first_arc_[node_count]);
    std::vector<uint32_t> place(first_arc_.begin(), first_arc_.end() - 1);
    for (const auto& edge : edges) {
      const uint32_t forward = place[edge.to]++;
      const uint32_t backward = place[edge.from]++;
      arcs_[forward] = {edge.from, backward, edge.capacity};
      arcs_[backward] = {edge.to, forward, 0};
    }
  }

  // Returns, by node, whether it can still reach `to` after as much as possible was pushed from `from`.
  std::vector<bool> side_reaching(uint32_t from, uint32_t to) {
    from_ = from;
    to_ = to;
    relabel_all();
    for (uint32_t arc = first_arc_[from]; arc < first_arc_[from + 1]; ++arc)
      if (arcs_[arc].residual > 0) push(from, arc, arcs_[arc].residual);
    relabel_all();
    while (true) {
      while (highest_ > 0 && active_[highest_].empty()) --highest_;
      if (active_[highest_].empty()) break;
      const uint32_t node = active_[highest_].back();
      active_[highest_].pop_back();
      if (labels_[node] == highest_ && excess_[node] > 0) discharge(node);
      if (work_ > 4 * static_cast<uint64_t>(node_count_) + arcs_.size()) relabel_all();
    }
    relabel_all();
    std::vector<bool> side(node_count_);
    for (uint32_t node = 0; node < node_count_; ++node) side[node] = node != from_ && labels_[node] < node_count_;
    return side;
  }

 private:
  bool is_terminal(uint32_t node) const { return node == from_ || node == to_; }

  // Sets every label to the exact distance to `to_`; a node that cannot reach it has label node_count_ and is finished.
  void relabel_all() {
    work_ = 0;
    std::fill(labels_.begin(), labels_.end(), node_count_);
    for (auto& nodes : active_) nodes.clear();
    for (auto& nodes : at_label_) nodes.clear();
    highest_ = 0;
    labels_[to_] = 0;
    std::vector<uint32_t> reached{to_};
    for (size_t i = 0; i < reached.size(); ++i) {
      const uint32_t node = reached[i];
      next_arc_[node] = first_arc_[node];
      if (node != to_) enter_label(node);
      if (node != to_ && excess_[node] > 0) activate(node);
      for (uint32_t arc = first_arc_[node]; arc < first_arc_[node + 1]; ++arc) {
        const uint32_t before = arcs_[arc].to;
        if (before == from_ || labels_[before] != node_count_ || arcs_[arcs_[arc].reverse].residual == 0) continue;
        labels_[before] = labels_[node] + 1;
        reached.push_back(before);
      }
    }
  }

  void activate(uint32_t node) {
    active_[labels_[node]].push_back(node);
    highest_ = std::max(highest_, labels_[node]);
  }

  void push(uint32_t node, uint32_t arc_index, Excess amount) {
    Arc& arc = arcs_[arc_index];
    const auto pushed = static_cast<int64_t>(std::min<Excess>(amount, arc.residual));
    arc.residual -= pushed;
    arcs_[arc.reverse].residual += pushed;
    excess_[node] -= pushed;
    const bool was_idle = excess_[arc.to] == 0;
    excess_[arc.to] += pushed;
    if (was_idle && !is_terminal(arc.to) && labels_[arc.to] < node_count_) activate(arc.to);
  }

  void discharge(uint32_t node) {
    while (excess_[node] > 0) {
      for (uint32_t& arc = next_arc_[node]; arc < first_arc_[node + 1]; ++arc) {
        ++work_;
        if (arcs_[arc].residual == 0 || labels_[node] != labels_[arcs_[arc].to] + 1) continue;
        push(node, arc, excess_[node]);
        if (excess_[node] == 0) return;
      }
      if (!relabel(node)) return;
    }
  }

  // Lifts a node to just above its lowest neighbour; returns false if it cannot reach `to_` through any neighbour.
  bool relabel(uint32_t node) {
    const uint32_t old_label = labels_[node];
    uint32_t lowest = node_count_;
    for (uint32_t arc = first_arc_[node]; arc < first_arc_[node + 1]; ++arc)
      if (arcs_[arc].residual > 0) lowest = std::min(lowest, labels_[arcs_[arc].to]);
    work_ += first_arc_[node + 1] - first_arc_[node];
    labels_[node] = std::min(lowest + 1, node_count_);
    next_arc_[node] = first_arc_[node];
    leave_label(node, old_label);
    if (at_label_[old_label].empty()) close_gap(old_label);
    if (labels_[node] >= node_count_) return false;
    enter_label(node);
    return true;
  }

  void enter_label(uint32_t node) {
    auto& nodes = at_label_[labels_[node]];
    place_[node] = static_cast<uint32_t>(nodes.size());
    nodes.push_back(node);
  }

  void leave_label(uint32_t node, uint32_t label) {
    auto& nodes = at_label_[label];
    nodes[place_[node]] = nodes.back();
    place_[nodes.back()] = place_[node];
    nodes.pop_back();
  }

  // No node has this label any more, so none above it can reach `to_`.
  void close_gap(uint32_t label) {
    for (uint32_t above = label + 1; above < node_count_ && !at_label_[above].empty(); ++above) {
      for (const uint32_t node : at_label_[above]) labels_[node] = node_count_;
      at_label_[above].clear();
    }
  }

  uint32_t node_count_;
  uint32_t from_ = 0;
  uint32_t to_ = 0;
  std::vector<Arc> arcs_;
  std::vector<uint32_t> first_arc_;  // by node, into arcs_
  std::vector<uint32_t> labels_;
  std::vector<Excess> excess_;
  std::vector<uint32_t> next_arc_;
  std::vector<std::vector<uint32_t>> active_;    // by label; entries whose label has changed since are skipped
  std::vector<std::vector<uint32_t>> at_label_;  // by label, each node once
  std::vector<uint32_t> place_;                  // by node, into its list of at_label_
  uint32_t highest_ = 0;
  uint64_t work_ = 0;  // since the last relabel_all()
};

}  // namespace

void FlowNetwork::add_edge(uint32_t from, uint32_t to, int64_t capacity) {
  PENSTOCK_ASSERT(from < node_count_ && to < node_count_, "edge ", from, " -> ", to, " of ", node_count_, " nodes");
  PENSTOCK_ASSERT(capacity == kInfinite || (capacity >= 0 && capacity <= kCapacityMax), "capacity ", capacity);
  if (from != to && capacity > 0) edges_.push_back({from, to, capacity});
}

std::vector<bool> FlowNetwork::min_cut_source_side() const {
  return PushRelabel(node_count_, edges_).side_reaching(kSink, kSource);
}

}  // namespace penstock::graph
