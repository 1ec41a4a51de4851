// SPDX-License-Identifier: Apache-2.0
#pragma once
// One graph with its verdicts and its calibration, and the plans made for it: all that is needed to price again.

#include <vector>

#include "base/result.h"
#include "graph/effects.h"
#include "graph/ir.h"
#include "graph/plan.h"
#include "graph/price.h"

namespace penstock::graph {

// Immutable, so any thread may read it.
class PricedPlans {
 public:
  // Makes the plan of `mode` by `prices`, and the plans for comparison. Returns kMismatch as make_plan.
  static Result<PricedPlans> make(Graph graph, std::vector<Verdict> verdicts, Calibration calibration,
                                  const Prices& prices, CutMode mode);

  const Graph& graph() const { return graph_; }
  const std::vector<Verdict>& verdicts() const { return verdicts_; }  // by node
  const Calibration& calibration() const { return calibration_; }
  const Prices& prices() const { return prices_; }

  const Plan& chosen() const { return chosen_; }
  const Plan& none() const { return none_; }
  const Plan& maximal() const { return maximal_; }

  // Returns the plan that is chosen by other prices. Asserts that the prices are valid.
  Plan chosen_by(const Prices& prices) const;
  // Returns the seconds of one of the plans by other prices.
  StageSeconds seconds(const Plan& plan, const Prices& prices) const;
  // Returns how long a step takes with one of the plans, in addition to the loads in the prices.
  StepSeconds step(const Plan& plan, const Prices& prices) const;

 private:
  PricedPlans(Graph graph, std::vector<Verdict> verdicts, Calibration calibration, const Prices& prices)
      : graph_(std::move(graph)),
        verdicts_(std::move(verdicts)),
        calibration_(std::move(calibration)),
        prices_(prices) {}

  Graph graph_;
  std::vector<Verdict> verdicts_;
  Calibration calibration_;
  Prices prices_;
  Plan chosen_, none_, maximal_;
};

}  // namespace penstock::graph
