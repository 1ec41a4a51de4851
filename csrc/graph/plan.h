// SPDX-License-Identifier: Apache-2.0
#pragma once
// A Plan is the chosen cut with its explanation: which groups of the user's program move to the workers, which stay and
// for what reason, which values cross and at what cost. Once the loader's loads are known, fastest() finds the choice
// with the shortest step. Pure: the same graph, verdicts, calibration and prices give the same plan.

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "graph/cut_model.h"
#include "graph/effects.h"
#include "graph/ir.h"
#include "graph/price.h"

namespace penstock::graph {

enum class CutMode : uint8_t {
  kAuto,     // the shortest step if the loads are known, else the cheapest weighted sum
  kMaximal,  // all groups that can move
  kNone,     // no groups
};

// "auto", "maximal" or "none".
Result<CutMode> cut_mode_from_name(std::string_view name);

struct PlanGroup {
  std::optional<uint32_t> group;  // none for a node that belongs to no group
  std::string label;
  std::vector<std::string> operators;  // in program order
  std::vector<uint32_t> nodes;         // the same, as indices into the graph
  Level level = Level::kState;         // the highest of its nodes
  bool replicated = false;             // only reads sizes and constants, so either side may compute it
  std::string reason;                  // why it stays or moves: one sentence without its full stop
  double worker_s = 0;                 // seconds per batch if it ran in a worker
  double trainer_s = 0;                // seconds per batch if it ran in the trainer; 0 for groups that cannot move

  friend bool operator==(const PlanGroup&, const PlanGroup&) = default;
};

struct Plan {
  std::vector<PlanGroup> moved;  // the trainer's program consists of all other groups
  std::vector<PlanGroup> kept;
  std::vector<ValueId> boundary;            // computed by workers and read by the trainer
  std::vector<std::string> boundary_names;  // the same, by name
  std::vector<uint32_t> raw_leaves;         // leaves that the trainer still reads
  int64_t raw_bytes = 0;                    // per batch: of all leaves, each storage once
  int64_t maximal_bytes = 0;                // bytes that would cross if all movable groups moved
  int64_t boundary_bytes = 0;               // bytes that cross: boundary values and raw leaves, each storage once
  int64_t sent_bytes = 0;                   // bytes that workers send: the same, or of all leaves if those cross
  double worker_s = 0;                      // a worker's seconds per batch
  double trainer_s = 0;                     // the trainer's seconds per batch on kept operators that could have moved
  StageSeconds seconds;                     // the same by stage, with the cost of writing and reading the boundary
  std::optional<double> step_s;             // how long a step takes, if the loads are known

  friend bool operator==(const Plan&, const Plan&) = default;
};

// `verdicts` and `calibration` must be for this graph; returns kMismatch if they are not, or if a price is invalid.
Result<Plan> make_plan(const Graph& graph, std::span<const Verdict> verdicts, const Calibration& calibration,
                       const Prices& prices, CutMode mode);

// Returns the plan's seconds by other prices than the ones it was made with. The calibration is the same. Returns
// kMismatch as above.
Result<StageSeconds> plan_seconds(const Graph& graph, std::span<const Verdict> verdicts, const Calibration& calibration,
                                  const Prices& prices, const Plan& plan);

// How many minimum cuts are computed, and how many choices are examined between two corners.
inline constexpr int kCornerCutsMax = 32;
inline constexpr int kWalkMax = 512;

struct Corner {
  Choice choice;
  StageSeconds seconds;
};

// Returns the corners, the choices that are cheapest for some weight of the stages, starting with the one with the
// least trainer seconds. If there is a link between the stages, its seconds count like the workers'.
std::vector<Corner> corners(const CutModel& model);

// Returns the choice with the shortest step, where a step takes as long as the slowest stage (price.h); of choices with
// the same step, the one with the least total seconds. Requires that the model's prices have loads.
//
// Which stage is the slowest depends on the choice, and a minimum cut only minimises sums. But a step is a maximum of
// sums with positive weights, so the shortest step is among the choices that no other choice beats in both the
// trainer's and the workers' seconds. The corners are points of a convex line, and one minimum cut finds each of them:
// take the weight for which two known corners cost the same; either a cheaper choice exists, which is a corner between
// them, or there is none. The true optimum can be between two neighbouring corners (a chain of equal operators has no
// corners except its ends). So, starting from the corner on either side of the balance, units are changed one by one to
// the other corner's choice, and each valid choice on the way is a candidate. No cut and the maximal cut are candidates
// too: by the prices, the chosen cut is never slower than either.
Choice fastest(const CutModel& model, const Loads& loads);

}  // namespace penstock::graph
