// SPDX-License-Identifier: Apache-2.0
#pragma once
// The choice whose step is the shortest, where a step takes as long as the slowest stage (price.h).
//
// Which stage is the slowest depends on the choice, and a minimum cut knows sums alone. But a step is a maximum of sums
// with positive weights, so the shortest one is among the choices that no other beats in both the trainer's and the
// workers' seconds. Those of them that are cheapest for some weight are the corners of a convex line, and each is found
// by one minimum cut: take the weight for which two known corners cost the same; either a cheaper choice exists, which
// is a corner between them, or there is none. The true optimum can lie between two neighbouring corners (a chain of
// equal operators has no corner but its ends). So, from the corner on either side of the balance, the units of the
// other one are taken over one after the other, and each valid choice on the way is a candidate. No cut and the maximal
// one are candidates too: by the prices, the chosen cut is never slower than either.

#include <vector>

#include "graph/cut_model.h"

namespace penstock::graph {

// How many minimum cuts are asked for, and how many choices are looked at between two corners.
inline constexpr int kCornerCutsMax = 32;
inline constexpr int kWalkMax = 512;

struct Corner {
  Choice choice;
  StageSeconds seconds;
};

// The corners, from the one with the least seconds in the trainer on. Where a link lies between them, its seconds count
// as the workers' do.
std::vector<Corner> corners(const CutModel& model);

// Needs the model's prices to have loads. Of choices with the same step, the one with the least seconds in all.
Choice fastest(const CutModel& model, const Loads& loads);

}  // namespace penstock::graph
