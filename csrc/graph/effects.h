// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which nodes could run in a worker: forward dataflow of effect levels over the graph. A node has the join of its own
// level and those of its operands. Unknown nodes stay: an operator without traits is as good as STATE.
//
// Memory is followed by alias sets. A value whose set is written in place anywhere, also later, is STATE ("pinned"):
// the worker would see it before the write or after, and only program order in the trainer says which is right. An
// unknown operator may write its operands too, but pinning those would keep whatever precedes a kept operator, so it
// spoils their sets for the nodes that come after it only.
//
// A second view of memory that the user has stays (second_views.h).
//
// An operator on a device of which a CPU may give other bits stays, unless its results may be inexact. What follows
// from an inexact value is inexact, too; where a difference in last bits can become another result altogether (another
// integer, a number that was rounded the other way), the operator stays.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "graph/ir.h"

namespace penstock::graph {

enum class Level : uint8_t {
  kConst,      // depends on constants alone
  kShape,      // ... and on sizes of the batch
  kStateless,  // ... and on the batch's contents
  kRandom,     // ... and on random draws
  kState,      // depends on values that training changes, or is not known
};

// "CONST", "SHAPE", ...
std::string_view name_of(Level level);

struct EffectOptions {
  bool allow_random = false;     // random draws may move to the workers
  bool is_whole_program = true;  // outputs go to the user; those of a prefix go to the rest of the program
  // Values that nodes make and that the user has all the same, as if they were inputs.
  std::vector<ValueId> known_outside{};
  // By value, or empty: the number of its memory where the program was run. Values with different numbers share none,
  // although the schema of an operator would allow it.
  std::vector<std::optional<int64_t>> memory{};
  // By value, or empty: whether its last bits may be other than the device's. For floating-point tensors alone.
  std::vector<bool> may_be_inexact{};
};

struct Verdict {
  Level level = Level::kState;
  bool movable = false;         // a worker could run it
  bool is_second_view = false;  // it stays in the trainer all the same
  bool has_other_bits = false;  // it is movable, although a CPU may give other bits than the device
  bool is_inexact = false;      // it is that, or follows from such a node
  std::string reason;           // one sentence without its full stop

  friend bool operator==(const Verdict&, const Verdict&) = default;
};

// One verdict per node of an annotated graph.
std::vector<Verdict> analyse_effects(const Graph& graph, const EffectOptions& options);

inline bool must_stay(const Verdict& verdict) { return !verdict.movable || verdict.is_second_view; }

// Whether trainer and workers can both compute the node, so that its results need not cross: it reads constants and
// sizes alone.
inline bool is_replicable(const Verdict& verdict) { return verdict.movable && verdict.level <= Level::kShape; }

}  // namespace penstock::graph
