// SPDX-License-Identifier: Apache-2.0
#include "graph/priced_cut.h"

#include <algorithm>

namespace penstock::graph {
namespace {

constexpr double kScaleMin = 0.05, kScaleMax = 20;

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

}  // namespace

MovedUnits units_moved(const Plan& plan) {
  MovedUnits units;
  for (const PlanGroup& group : plan.moved) units.insert(group.group);
  return units;
}

double clamped_scale(double scale) { return std::min(kScaleMax, std::max(kScaleMin, scale)); }

std::optional<TimedCall> GraphPricing::next_timed_call() {
  const int index = next_call_++;
  if (index < 0) return std::nullopt;
  return index % 2 == 0 ? TimedCall::kWhole : TimedCall::kSuffix;
}

void GraphPricing::begin_timed_calls() {
  next_call_ = -kCallsBefore;
  seconds_ = {};
}

void GraphPricing::learn_scale(const PricedPlans& plans, uint32_t workers) {
  const auto& [whole, suffix] = seconds_;
  if (std::min(whole.size(), suffix.size()) < kTimedCalls / 3) return;
  const double saved_s = median(whole) - median(suffix);
  const auto planned_s = [&](double scale) {
    Prices prices = local_prices(workers);
    prices.trainer_scale = scale;
    return plans.seconds(plans.none(), prices).trainer_s - plans.seconds(plans.chosen(), prices).trainer_s;
  };
  const double at_none = planned_s(0), at_one = planned_s(1);
  if (at_one > at_none) trainer_scale_ = clamped_scale((saved_s - at_none) / (at_one - at_none));
}

}  // namespace penstock::graph
