// SPDX-License-Identifier: Apache-2.0
#pragma once
// The effect analysis determines which nodes could run in a worker: forward dataflow of effect levels over the graph. A
// node's level is the join of its intrinsic level and its operands' levels. Unknown nodes stay: an operator without
// traits counts as STATE.
//
// Memory is tracked by alias sets. A value whose set is written in place anywhere, even later, is STATE ("pinned"): the
// worker would see it before or after the write, and only program order in the trainer determines which is right. An
// unknown operator may write its operands too, but pinning them would keep everything that precedes a kept operator, so
// it only spoils their sets for the nodes after it.
//
// A second view of memory that the user has stays. The results of forward belong to the user, who may write to them. If
// two results share memory, or a result and an input, each view of that memory stays, and so do the views in between:
// if sent they would be copies, and a write to one of them would not be seen in the others. The memory itself may still
// be made by a worker.
//
// An operator on a device for which a CPU may give other bits stays, unless its results may be inexact. Values that
// depend on an inexact value are inexact, too; if a difference in the last bits can lead to a completely different
// result (another integer, a number rounded in the other direction), the operator stays.

#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "graph/ir.h"

namespace penstock::graph {

enum class Level : uint8_t {
  kConst,      // depends only on constants
  kShape,      // ... and on sizes of the batch
  kStateless,  // ... and on the batch's contents
  kRandom,     // ... and on random draws
  kState,      // depends on values that training changes, or is not known
};

// "CONST", "SHAPE", ...
std::string_view name_of(Level level);

struct EffectOptions {
  bool allow_random = false;     // random draws may move to the workers
  bool is_whole_program = true;  // outputs are for the user; a prefix's outputs are for the rest of the program
  // Values that nodes make but that the user can access, as if they were inputs.
  std::vector<ValueId> known_outside{};
  // By value, or empty: the number of its memory in the run of the program. Values with different numbers do not share
  // memory, even if the operator's schema would allow it.
  std::vector<std::optional<int64_t>> memory{};
  // By value, or empty: whether its last bits may differ from the device's. Only for floating-point tensors.
  std::vector<bool> may_be_inexact{};
};

struct Verdict {
  Level level = Level::kState;
  bool movable = false;         // a worker could run it
  bool is_second_view = false;  // it stays in the trainer although it is movable
  bool has_other_bits = false;  // it is movable, although a CPU may give other bits than the device
  bool is_inexact = false;      // it has other bits, or depends on such a node
  std::string reason;           // one sentence without its full stop

  friend bool operator==(const Verdict&, const Verdict&) = default;
};

// Returns one verdict per node of an annotated graph.
std::vector<Verdict> analyse_effects(const Graph& graph, const EffectOptions& options);

inline bool must_stay(const Verdict& verdict) { return !verdict.movable || verdict.is_second_view; }

// Whether trainer and workers can both compute the node, so that its results need not cross: it only reads constants
// and sizes.
inline bool is_replicable(const Verdict& verdict) { return verdict.movable && verdict.level <= Level::kShape; }

// Tracks which values of a graph may share memory, as disjoint sets. Thread-compatible once built; find() of a const
// set does not compress.
class AliasSets {
 public:
  explicit AliasSets(size_t value_count) : parents_(value_count) { std::iota(parents_.begin(), parents_.end(), 0); }

  void unite(ValueId a, ValueId b) {
    const ValueId root_a = compress(a);
    const ValueId root_b = compress(b);
    // The smaller id is the representative, so the sets do not depend on the order of the calls.
    if (root_a < root_b) parents_[root_b] = root_a;
    if (root_b < root_a) parents_[root_a] = root_b;
  }

  ValueId find(ValueId value) const {
    while (parents_[value] != value) value = parents_[value];
    return value;
  }

 private:
  ValueId compress(ValueId value) {
    while (parents_[value] != value) value = parents_[value] = parents_[parents_[value]];
    return value;
  }

  std::vector<ValueId> parents_;
};

}  // namespace penstock::graph
