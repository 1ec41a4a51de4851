// SPDX-License-Identifier: Apache-2.0
#include "graph/priced_plans.h"

#include <utility>

namespace penstock::graph {

Result<PricedPlans> PricedPlans::make(Graph graph, std::vector<Verdict> verdicts, Calibration calibration,
                                      const Prices& prices, CutMode mode) {
  PricedPlans plans(std::move(graph), std::move(verdicts), std::move(calibration), prices);
  for (const auto& [plan, of_mode] : {std::pair{&plans.chosen_, mode}, std::pair{&plans.none_, CutMode::kNone},
                                      std::pair{&plans.maximal_, CutMode::kMaximal}}) {
    Result<Plan> made = make_plan(plans.graph_, plans.verdicts_, plans.calibration_, prices, of_mode);
    if (!made) return made.error();
    *plan = std::move(made).value();
  }
  return plans;
}

Plan PricedPlans::chosen_by(const Prices& prices) const {
  return make_plan(graph_, verdicts_, calibration_, prices, CutMode::kAuto).value();
}

StageSeconds PricedPlans::seconds(const Plan& plan, const Prices& prices) const {
  return plan_seconds(graph_, verdicts_, calibration_, prices, plan).value();
}

StepSeconds PricedPlans::step(const Plan& plan, const Prices& prices) const {
  return step_of(prices, prices.loads.value_or(Loads{}), seconds(plan, prices));
}

}  // namespace penstock::graph
