// SPDX-License-Identifier: Apache-2.0
#include "graph/priced_plans.h"

#include <utility>

namespace penstock::graph {

Result<PricedPlans> PricedPlans::make(Graph graph, std::vector<Verdict> verdicts, Calibration calibration,
                                      const Prices& prices, CutMode mode) {
  PricedPlans plans(std::move(graph), std::move(verdicts), std::move(calibration), prices);
  const Prices with_device = with_copies(prices, plans.calibration_);
  for (const auto& [plan, of_mode] : {std::pair{&plans.chosen_, mode}, std::pair{&plans.none_, CutMode::kNone},
                                      std::pair{&plans.maximal_, CutMode::kMaximal}}) {
    Result<Plan> made = make_plan(plans.graph_, plans.verdicts_, plans.calibration_, with_device, of_mode);
    if (!made) return made.error();
    *plan = std::move(made).value();
  }
  return plans;
}

Plan PricedPlans::chosen_by(const Prices& prices) const {
  return make_plan(graph_, verdicts_, calibration_, with_copies(prices, calibration_), CutMode::kAuto).value();
}

StageSeconds PricedPlans::seconds(const Plan& plan, const Prices& prices) const {
  return plan_seconds(graph_, verdicts_, calibration_, with_copies(prices, calibration_), plan).value();
}

StepSeconds PricedPlans::step(const Plan& plan, const Prices& prices) const {
  return step_of(prices, prices.loads.value_or(Loads{}), seconds(plan, prices));
}

}  // namespace penstock::graph
