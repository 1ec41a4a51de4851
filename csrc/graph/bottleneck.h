// SPDX-License-Identifier: Apache-2.0
#pragma once
// Finds the choice with the shortest step, where a step takes as long as the slowest stage (price.h).
//
// Which stage is the slowest depends on the choice, and a minimum cut only minimises sums. But a step is a maximum of
// sums with positive weights, so the shortest step is among the choices that no other choice beats in both the
// trainer's and the workers' seconds. The choices that are cheapest for some weight are the corners of a convex line,
// and one minimum cut finds each of them: take the weight for which two known corners cost the same; either a cheaper
// choice exists, which is a corner between them, or there is none. The true optimum can be between two neighbouring
// corners (a chain of equal operators has no corners except its ends). So, starting from the corner on either side of
// the balance, units are changed one by one to the other corner's choice, and each valid choice on the way is a
// candidate. No cut and the maximal cut are candidates too: by the prices, the chosen cut is never slower than either.

#include <vector>

#include "graph/cut_model.h"

namespace penstock::graph {

// How many minimum cuts are computed, and how many choices are examined between two corners.
inline constexpr int kCornerCutsMax = 32;
inline constexpr int kWalkMax = 512;

struct Corner {
  Choice choice;
  StageSeconds seconds;
};

// Returns the corners, starting with the one with the least trainer seconds. If there is a link between the stages, its
// seconds count like the workers'.
std::vector<Corner> corners(const CutModel& model);

// Requires that the model's prices have loads. Of choices with the same step, returns the one with the least total
// seconds.
Choice fastest(const CutModel& model, const Loads& loads);

}  // namespace penstock::graph
