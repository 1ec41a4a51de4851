// SPDX-License-Identifier: Apache-2.0
// The cut model as a flow network. The source's side is the worker's. Nodes of the network are
//   x  of a free unit: it moves
//   y  of a replicable unit: the trainer does not compute it
//   w  of a replicable node: workers compute it
//   in, out  of a storage that may cross: some value of it is made in workers; no unit in the trainer reads it. Twice,
//            since a raw leaf crosses the link but is not a boundary tensor
// and every rule of cut_model.cpp is an infinite edge: "a on the worker's side implies b on it".

#include <algorithm>
#include <unordered_map>

#include "graph/cut_model.h"
#include "graph/min_cut.h"

namespace penstock::graph {

class CutModel::Network {
 public:
  Network(const CutModel& model, const Weights& weights) : model_(model), weights_(weights) {
    for (uint32_t unit = 0; unit < model_.units_.size(); ++unit) add_unit(unit);
    const Choice draws = model_.draws();
    for (uint32_t unit = 0; unit < draws.size(); ++unit)
      if (draws[unit]) imply(FlowNetwork::kSource, units_[unit]);
    for (uint32_t node = 0; node < model_.graph_.nodes.size(); ++node) add_node(node);
    for (uint32_t node = 0; node < model_.graph_.nodes.size(); ++node) link_operands(node);
    for (ValueId value = 0; value < model_.places_.size(); ++value) link_readers(value);
    for (const auto& [storage, gate] : link_gates_)
      network_.add_edge(gate.in, gate.out, price(link_seconds(model_.prices_, gate.bytes)));
    for (const auto& [storage, gate] : memory_gates_)
      network_.add_edge(gate.in, gate.out, price(memory_seconds(model_.prices_, gate.bytes)));
  }

  Choice solve() const {
    const std::vector<bool> worker_side = network_.min_cut_source_side();
    Choice choice = model_.nothing();
    for (uint32_t unit = 0; unit < choice.size(); ++unit)
      choice[unit] = model_.units_[unit].kind == UnitKind::kFree && worker_side[units_[unit]];
    return choice;
  }

 private:
  struct Gate {
    uint32_t in;
    uint32_t out;
    int64_t bytes;
  };
  using Gates = std::unordered_map<uint32_t, Gate>;  // by storage

  Ticks price(const StageSeconds& seconds) const { return price_of(model_.prices_, weights_, seconds); }

  void add_unit(uint32_t unit) {
    if (model_.units_[unit].kind == UnitKind::kFixed) {
      units_.push_back(FlowNetwork::kSink);
      return;
    }
    units_.push_back(network_.add_node());
    Ticks sum = 0;
    for (const uint32_t node : model_.units_[unit].nodes) sum += price({.trainer_s = model_.trainer_node_s(node)});
    network_.add_edge(FlowNetwork::kSource, units_[unit], sum);
  }

  // A replicable node has a separate vertex; any other node shares its unit's.
  void add_node(uint32_t node) {
    const uint32_t unit = units_[model_.unit_of_[node]];
    const bool is_own = model_.replicable_nodes_[node];
    nodes_.push_back(is_own ? network_.add_node() : unit);
    const UnitKind kind = model_.units_[model_.unit_of_[node]].kind;
    if (!is_own && kind != UnitKind::kFree) return;
    network_.add_edge(nodes_[node], FlowNetwork::kSink, price({.worker_s = model_.worker_node_s(node)}));
    if (kind == UnitKind::kFree) imply(unit, nodes_[node]);
  }

  // A node that runs in workers needs its operands there.
  void link_operands(uint32_t node) {
    const UnitKind kind = model_.units_[model_.unit_of_[node]].kind;
    if (!model_.replicable_nodes_[node] && kind != UnitKind::kFree) return;
    for_each_operand(model_.graph_.nodes[node], [&](ValueId operand) {
      const Place& place = model_.places_[operand];
      if (place.is_made) imply(nodes_[node], nodes_[place.node]);
    });
  }

  // A value that the trainer reads is computed there too, or crosses.
  void link_readers(ValueId value) {
    const Place& place = model_.places_[value];
    const bool is_free = place.is_made && model_.units_[place.unit].kind == UnitKind::kFree;
    const bool is_replicable = place.is_made && model_.units_[place.unit].kind == UnitKind::kReplicable;
    if (!place.is_leaf && !is_free && !is_replicable) return;
    for (const Read& read : model_.reads_[value]) {
      if (place.is_made && read.unit == place.unit) continue;
      const uint32_t reader = read.unit == kOutside ? FlowNetwork::kSink : units_[read.unit];
      if (is_replicable || (is_free && !place.is_tensor)) {
        imply(units_[place.unit], reader);
      } else if (is_free) {
        for (Gates* gates : {&link_gates_, &memory_gates_}) pass(*gates, value, units_[place.unit], reader);
      } else if (!read.sizes_only && !model_.prices_.raw_stays) {
        pass(link_gates_, value, FlowNetwork::kSource, reader);
      }
    }
  }

  // A value made by `maker` costs the gate of its storage if `reader` stays.
  void pass(Gates& gates, ValueId value, uint32_t maker, uint32_t reader) {
    const uint32_t storage = model_.storage_of(value);
    auto found = gates.find(storage);
    if (found == gates.end()) {
      const uint32_t in = network_.add_node();
      found = gates.emplace(storage, Gate{in, network_.add_node(), 0}).first;
    }
    Gate& gate = found->second;
    gate.bytes = std::max(gate.bytes, model_.calibration_.values[value].bytes);
    imply(maker, gate.in);
    imply(gate.out, reader);
  }

  void imply(uint32_t a, uint32_t b) { network_.add_edge(a, b, FlowNetwork::kInfinite); }

  const CutModel& model_;
  const Weights& weights_;
  FlowNetwork network_;
  std::vector<uint32_t> units_;  // by unit, its vertex
  std::vector<uint32_t> nodes_;  // by node, its vertex as part of the workers' program
  Gates link_gates_;
  Gates memory_gates_;
};

Choice CutModel::cheapest(const Weights& weights) const { return Network(*this, weights).solve(); }

}  // namespace penstock::graph
