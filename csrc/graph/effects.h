// SPDX-License-Identifier: Apache-2.0
#pragma once
// Determines which nodes could run in a worker: forward dataflow of effect levels over the graph. A node's level is the
// join of its intrinsic level and its operands' levels. Unknown nodes stay: an operator without traits counts as STATE.
//
// Memory is tracked by alias sets. A value whose set is written in place anywhere, even later, is STATE ("pinned"): the
// worker would see it before or after the write, and only program order in the trainer determines which is right. An
// unknown operator may write its operands too, but pinning them would keep everything that precedes a kept operator, so
// it only spoils their sets for the nodes after it.
//
// A second view of memory that the user has stays (second_views.h).
//
// An operator on a device for which a CPU may give other bits stays, unless its results may be inexact. Values that
// depend on an inexact value are inexact, too; if a difference in the last bits can lead to a completely different
// result (another integer, a number rounded in the other direction), the operator stays.

#include <cstdint>
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

}  // namespace penstock::graph
