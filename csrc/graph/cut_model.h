// SPDX-License-Identifier: Apache-2.0
#pragma once
// The CutModel models the choice that a plan makes, without making it: the units, the consequences of moving a set of
// them and their costs, and the network whose minimum cut is the cheapest choice.
//
// A *unit* moves as a whole: a group of nodes, or a node without a group. Three kinds:
//   fixed       some node must not move, so the unit stays
//   replicable  every node only reads constants and sizes: trainer and workers compute it, each only when it needs it
//   free        the choice
// Within a fixed or free unit a worker may still compute single replicable nodes for itself (the prefix is cut by
// nodes, the trainer's program by units).

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "graph/effects.h"
#include "graph/ir.h"
#include "graph/price.h"

namespace penstock::graph {

enum class UnitKind : uint8_t { kFixed, kReplicable, kFree };

struct Unit {
  UnitKind kind = UnitKind::kFixed;
  std::optional<uint32_t> group;
  std::vector<uint32_t> nodes;  // in program order
  uint32_t deciding_node = 0;   // the node whose verdict represents the unit
  bool draws = false;           // random numbers
};

// By unit, whether it moves. Only free units can.
using Choice = std::vector<bool>;

// The consequences of a choice.
struct Cut {
  std::vector<bool> runs_in_worker;   // by node
  std::vector<bool> runs_in_trainer;  // by unit
  std::vector<ValueId> boundary;      // computed in workers, read by the trainer; ascending
  std::vector<ValueId> raw;           // leaves that the trainer reads; ascending
  int64_t boundary_bytes = 0;         // of both, each storage once
  int64_t sent_bytes = 0;             // bytes that workers send: of the boundary, and of leaves that cross
  StageSeconds seconds;               // without the loads
};

// Thread-compatible. Keeps references to all of its arguments.
class CutModel {
 public:
  CutModel(const Graph& graph, std::span<const Verdict> verdicts, const Calibration& calibration, const Prices& prices);

  const std::vector<Unit>& units() const { return units_; }

  // Whether the choice can be run: every value that moved units read is available, and only tensors cross.
  bool is_valid(const Choice& choice) const;

  // Returns the largest valid choice within `choice`.
  Choice shrink_to_valid(Choice choice) const;

  // Returns the smallest valid choice that contains `choice`, or none if it would move a fixed unit.
  std::optional<Choice> grow_to_valid(Choice choice) const;

  // Returns the consequences of a valid choice.
  Cut cut(const Choice& choice) const;

  // Returns the cheapest valid choice by a weighted sum; of several, the one that moves least. Random draws that may
  // move do move, independent of the price: the side on which they are made decides their numbers, and numbers must not
  // depend on a clock.
  Choice cheapest(const Weights& weights) const;
  Choice cheapest() const { return cheapest(prices_.weights()); }

  // Returns the weighted sum of a choice's costs.
  Ticks price(const Cut& cut, const Weights& weights) const;
  Ticks price(const Cut& cut) const { return price(cut, prices_.weights()); }

  Choice nothing() const { return Choice(units_.size(), false); }
  Choice everything() const;

  // Returns the smallest valid choice that moves every draw that can be moved.
  Choice draws() const;

  // Returns the bytes of all leaves, each storage once.
  int64_t raw_bytes() const;

  // The seconds of a node in the trainer, and in a worker.
  double trainer_node_s(uint32_t node) const;
  double worker_node_s(uint32_t node) const { return calibration_.node_s[node] * prices_.worker_scale; }

  const Prices& prices() const { return prices_; }

 private:
  struct Read {
    uint32_t unit;  // the reader, or kOutside for the graph's outputs
    uint32_t node;
    bool sizes_only;  // of a leaf: the trainer does not need its contents
  };
  struct Place {
    bool is_leaf = false;
    bool is_made = false;  // by a node
    bool is_tensor = false;
    uint32_t unit = 0;  // of the node that makes it
    uint32_t node = 0;
  };
  static constexpr uint32_t kOutside = 0xffffffff;

  void make_units(std::span<const Verdict> verdicts);
  void place_values();
  // Calls on_cost(StageSeconds) for each cost of a choice; a weighted sum rounds each of them separately.
  template <typename OnCost>
  void each_cost(const Cut& cut, const OnCost& on_cost) const;
  uint32_t storage_of(ValueId value) const;
  template <typename OnViolation>
  void each_violation(const Choice& choice, const OnViolation& on_violation) const;
  class Network;

  const Graph& graph_;
  const Calibration& calibration_;
  const Prices prices_;
  std::vector<Unit> units_;
  std::vector<uint32_t> unit_of_;  // by node
  std::vector<bool> replicable_nodes_;
  std::vector<Place> places_;             // by value
  std::vector<std::vector<Read>> reads_;  // by value
};

}  // namespace penstock::graph
