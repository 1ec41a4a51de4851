// SPDX-License-Identifier: Apache-2.0
#include "graph/cut_model.h"

#include <algorithm>
#include <map>
#include <unordered_map>

#include "base/result.h"
#include "graph/min_cut.h"

namespace penstock::graph {
namespace {

// If the trainer reads batches on a device, the copies to the device are part of the link, whose rate is then at most
// the copy rate.
Prices with_copies(Prices prices, const Calibration& calibration) {
  if (calibration.copy_bytes_per_s > 0)
    prices.link_bytes_per_s = std::min(prices.link_bytes_per_s, calibration.copy_bytes_per_s);
  return prices;
}

}  // namespace

CutModel::CutModel(const Graph& graph, std::span<const Verdict> verdicts, const Calibration& calibration,
                   const Prices& prices)
    : graph_(graph), calibration_(calibration), prices_(with_copies(prices, calibration)) {
  PENSTOCK_ASSERT(verdicts.size() == graph.nodes.size(), verdicts.size(), " verdicts");
  PENSTOCK_ASSERT(calibration.node_s.size() == graph.nodes.size(), calibration.node_s.size(), " node times");
  PENSTOCK_ASSERT(calibration.values.size() == graph.value_names.size(), calibration.values.size(), " value sizes");
  make_units(verdicts);
  place_values();
}

void CutModel::make_units(std::span<const Verdict> verdicts) {
  std::unordered_map<uint32_t, uint32_t> unit_of_group;
  for (uint32_t node = 0; node < graph_.nodes.size(); ++node) {
    const auto& group = graph_.nodes[node].group;
    auto unit = static_cast<uint32_t>(units_.size());
    if (group) unit = unit_of_group.try_emplace(*group, unit).first->second;
    if (unit == units_.size()) units_.push_back({UnitKind::kReplicable, group, {}, node});
    units_[unit].nodes.push_back(node);
    if (node < graph_.traits.size() && graph_.traits[node].purity == Purity::kRandom) units_[unit].draws = true;
    unit_of_.push_back(unit);
    replicable_nodes_.push_back(is_replicable(verdicts[node]));
    // The first node of the most restrictive kind decides.
    const UnitKind kind = must_stay(verdicts[node])  ? UnitKind::kFixed
                          : replicable_nodes_.back() ? UnitKind::kReplicable
                                                     : UnitKind::kFree;
    const auto binding = [](UnitKind k) { return k == UnitKind::kFixed ? 2 : k == UnitKind::kFree ? 1 : 0; };
    if (binding(kind) > binding(units_[unit].kind)) {
      units_[unit].kind = kind;
      units_[unit].deciding_node = node;
    }
  }
}

void CutModel::place_values() {
  places_.resize(graph_.value_names.size());
  reads_.resize(graph_.value_names.size());
  for (const Input& input : graph_.inputs) {
    places_[input.value].is_leaf = input.kind == InputKind::kLeaf;
    places_[input.value].is_tensor = input.kind != InputKind::kInt;
  }
  for (uint32_t node = 0; node < graph_.nodes.size(); ++node) {
    const Traits* traits = node < graph_.traits.size() ? &graph_.traits[node] : nullptr;
    const bool reads_sizes_only = traits != nullptr && traits->purity == Purity::kMetadata;
    for_each_operand(graph_.nodes[node], [&](ValueId operand) {
      reads_[operand].push_back({unit_of_[node], node, reads_sizes_only});
    });
    for (size_t i = 0; i < graph_.nodes[node].results.size(); ++i) {
      Place& place = places_[graph_.nodes[node].results[i]];
      place.is_made = true;
      place.is_tensor =
          traits != nullptr && i < traits->result_kinds.size() && traits->result_kinds[i] == ValueKind::kTensor;
      place.unit = unit_of_[node];
      place.node = node;
    }
  }
  for (const Output& output : graph_.outputs) reads_[output.value].push_back({kOutside, kOutside, false});
}

uint32_t CutModel::storage_of(ValueId value) const {
  // A value that was not measured, or is not a tensor, has separate storage.
  const uint32_t storage = calibration_.values[value].storage;
  return storage != ValueSize::kNoStorage ? storage : ValueSize::kNoStorage - 1 - value;
}

Choice CutModel::everything() const {
  Choice choice = nothing();
  for (size_t unit = 0; unit < units_.size(); ++unit) choice[unit] = units_[unit].kind == UnitKind::kFree;
  return choice;
}

Choice CutModel::draws() const {
  Choice choice = nothing();
  if (std::none_of(units_.begin(), units_.end(), [](const Unit& unit) { return unit.draws; })) return choice;
  Choice most = shrink_to_valid(everything());
  for (size_t unit = 0; unit < units_.size(); ++unit) choice[unit] = most[unit] && units_[unit].draws;
  return grow_to_valid(std::move(choice)).value_or(std::move(most));
}

int64_t CutModel::raw_bytes() const {
  std::map<uint32_t, int64_t> bytes;
  for (const Input& input : graph_.inputs) {
    if (input.kind != InputKind::kLeaf) continue;
    int64_t& most = bytes[storage_of(input.value)];
    most = std::max(most, calibration_.values[input.value].bytes);
  }
  int64_t sum = 0;
  for (const auto& [storage, size] : bytes) sum += size;
  return sum;
}

Cut CutModel::cut(const Choice& choice) const {
  Cut cut;
  // The trainer runs all units that did not move, and the replicable units that they read.
  cut.runs_in_trainer.resize(units_.size());
  std::vector<uint32_t> pending_units;
  const auto run_in_trainer = [&](uint32_t unit) {
    if (cut.runs_in_trainer[unit]) return;
    cut.runs_in_trainer[unit] = true;
    pending_units.push_back(unit);
  };
  const auto read_in_trainer = [&](ValueId value) {
    const Place& place = places_[value];
    if (place.is_made && units_[place.unit].kind == UnitKind::kReplicable) run_in_trainer(place.unit);
  };
  for (uint32_t unit = 0; unit < units_.size(); ++unit)
    if (units_[unit].kind == UnitKind::kFixed || (units_[unit].kind == UnitKind::kFree && !choice[unit]))
      run_in_trainer(unit);
  for (const Output& output : graph_.outputs) read_in_trainer(output.value);
  while (!pending_units.empty()) {
    const uint32_t unit = pending_units.back();
    pending_units.pop_back();
    for (const uint32_t node : units_[unit].nodes) for_each_operand(graph_.nodes[node], read_in_trainer);
  }
  // Workers run all units that moved, and the replicable nodes that they read.
  cut.runs_in_worker.resize(graph_.nodes.size());
  std::vector<uint32_t> pending_nodes;
  const auto run_in_worker = [&](uint32_t node) {
    if (cut.runs_in_worker[node]) return;
    cut.runs_in_worker[node] = true;
    pending_nodes.push_back(node);
  };
  for (uint32_t unit = 0; unit < units_.size(); ++unit)
    if (choice[unit])
      for (const uint32_t node : units_[unit].nodes) run_in_worker(node);
  while (!pending_nodes.empty()) {
    const uint32_t node = pending_nodes.back();
    pending_nodes.pop_back();
    for_each_operand(graph_.nodes[node], [&](ValueId operand) {
      const Place& place = places_[operand];
      if (place.is_made && replicable_nodes_[place.node]) run_in_worker(place.node);
    });
  }
  // Collect the values that cross.
  std::map<uint32_t, int64_t> storages;  // bytes
  for (ValueId value = 0; value < places_.size(); ++value) {
    const Place& place = places_[value];
    const bool is_moved = place.is_made && choice[place.unit];
    if (!place.is_leaf && !is_moved) continue;
    bool is_read = false;
    for (const Read& read : reads_[value]) {
      const bool reads_contents = !(place.is_leaf && read.sizes_only);
      is_read = is_read || (reads_contents && (read.unit == kOutside || cut.runs_in_trainer[read.unit]));
    }
    if (!is_read) continue;
    (place.is_leaf ? cut.raw : cut.boundary).push_back(value);
    int64_t& bytes = storages[storage_of(value)];
    bytes = std::max(bytes, calibration_.values[value].bytes);
  }
  for (const auto& [storage, bytes] : storages) cut.boundary_bytes += bytes;
  if (prices_.raw_stays) {
    for (const Input& input : graph_.inputs) {
      if (input.kind != InputKind::kLeaf) continue;
      int64_t& bytes = storages[storage_of(input.value)];
      bytes = std::max(bytes, calibration_.values[input.value].bytes);
    }
  }
  for (const auto& [storage, bytes] : storages) cut.sent_bytes += bytes;
  each_cost(cut, [&](const StageSeconds& seconds) { cut.seconds += seconds; });
  return cut;
}

template <typename OnCost>
void CutModel::each_cost(const Cut& cut, const OnCost& on_cost) const {
  std::map<uint32_t, std::pair<int64_t, int64_t>> storages;  // bytes that cross the link, and of boundary tensors
  const auto add = [&](ValueId value, bool is_boundary) {
    auto& [link_bytes, memory_bytes] = storages[storage_of(value)];
    const int64_t bytes = calibration_.values[value].bytes;
    if (is_boundary || !prices_.raw_stays) link_bytes = std::max(link_bytes, bytes);
    if (is_boundary) memory_bytes = std::max(memory_bytes, bytes);
  };
  for (const ValueId value : cut.raw) add(value, false);
  for (const ValueId value : cut.boundary) add(value, true);
  for (const auto& [storage, bytes] : storages) {
    on_cost(link_seconds(prices_, bytes.first));
    on_cost(memory_seconds(prices_, bytes.second));
  }
  for (uint32_t unit = 0; unit < units_.size(); ++unit)
    if (cut.runs_in_trainer[unit] && units_[unit].kind != UnitKind::kFixed)
      for (const uint32_t node : units_[unit].nodes) on_cost({.trainer_s = trainer_node_s(node)});
  for (uint32_t node = 0; node < graph_.nodes.size(); ++node)
    if (cut.runs_in_worker[node]) on_cost({.worker_s = worker_node_s(node)});
}

Ticks CutModel::price(const Cut& cut, const Weights& weights) const {
  Ticks price = 0;
  each_cost(cut, [&](const StageSeconds& seconds) { price += price_of(prices_, weights, seconds); });
  return price;
}

double CutModel::trainer_node_s(uint32_t node) const {
  const auto& seconds = calibration_.trainer_node_s.empty() ? calibration_.node_s : calibration_.trainer_node_s;
  const double kernel_s = seconds[node] * prices_.trainer_scale;
  // Arithmetic on sizes is not dispatched to a kernel, so its cost to the trainer is negligible.
  for (const ValueId result : graph_.nodes[node].results)
    if (places_[result].is_tensor) return kernel_s + prices_.trainer_node_s;
  return kernel_s;
}

// Calls on_violation(reader unit, maker unit, is_missing) for each read that the choice makes impossible. With
// is_missing, a moved reader needs a value that the trainer makes; without, the trainer needs a value from a moved
// maker that is not a tensor.
template <typename OnViolation>
void CutModel::each_violation(const Choice& choice, const OnViolation& on_violation) const {
  const std::vector<bool> runs_in_trainer = cut(choice).runs_in_trainer;
  for (ValueId value = 0; value < places_.size(); ++value) {
    const Place& place = places_[value];
    if (!place.is_made) continue;
    for (const Read& read : reads_[value]) {
      if (read.unit == place.unit) continue;
      const bool is_reader_moved = read.unit != kOutside && choice[read.unit];
      if (is_reader_moved && !choice[place.unit] && !replicable_nodes_[place.node])
        on_violation(read.unit, place.unit, true);
      if (choice[place.unit] && !place.is_tensor && (read.unit == kOutside || runs_in_trainer[read.unit]))
        on_violation(read.unit, place.unit, false);
    }
  }
}

bool CutModel::is_valid(const Choice& choice) const {
  bool is_valid = true;
  for (size_t unit = 0; unit < units_.size(); ++unit)
    is_valid = is_valid && (!choice[unit] || units_[unit].kind == UnitKind::kFree);
  each_violation(choice, [&](uint32_t, uint32_t, bool) { is_valid = false; });
  return is_valid;
}

Choice CutModel::shrink_to_valid(Choice choice) const {
  for (bool changed = true; changed;) {
    changed = false;
    const Choice before = choice;
    each_violation(before, [&](uint32_t reader, uint32_t maker, bool is_missing) {
      choice[is_missing ? reader : maker] = false;
      changed = true;
    });
  }
  return choice;
}

std::optional<Choice> CutModel::grow_to_valid(Choice choice) const {
  bool is_possible = true;
  for (bool changed = true; changed && is_possible;) {
    changed = false;
    const Choice before = choice;
    std::vector<uint32_t> pending;
    each_violation(before, [&](uint32_t reader, uint32_t maker, bool is_missing) {
      pending.push_back(is_missing ? maker : reader);
    });
    std::vector<bool> seen(units_.size());
    while (!pending.empty() && is_possible) {
      const uint32_t unit = pending.back();
      pending.pop_back();
      if (unit == kOutside || units_[unit].kind == UnitKind::kFixed) {
        is_possible = false;
      } else if (units_[unit].kind == UnitKind::kFree) {
        changed = changed || !choice[unit];
        choice[unit] = true;
      } else if (!seen[unit]) {
        // A replicable unit leaves the trainer once all of its readers there do.
        seen[unit] = true;
        for (const uint32_t node : units_[unit].nodes)
          for (const ValueId result : graph_.nodes[node].results)
            for (const Read& read : reads_[result]) pending.push_back(read.unit);
      }
    }
  }
  if (!is_possible) return std::nullopt;
  return choice;
}

// The cut model as a flow network: its minimum cut is the cheapest choice. The source's side is the worker's. Nodes of
// the network are
//   x  of a free unit: it moves
//   y  of a replicable unit: the trainer does not compute it
//   w  of a replicable node: workers compute it
//   in, out  of a storage that may cross: some value of it is made in workers; no unit in the trainer reads it. Twice,
//            since a raw leaf crosses the link but is not a boundary tensor
// and every rule of CutModel is an infinite edge: "a on the worker's side implies b on it".
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
