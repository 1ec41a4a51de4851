// SPDX-License-Identifier: Apache-2.0
#include "graph/repricer.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include "base/result.h"

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

namespace {

// The believable range of a scale.
constexpr double kScaleMin = 0.05, kScaleMax = 20;

double clamped_scale(double scale) { return std::min(kScaleMax, std::max(kScaleMin, scale)); }

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

MovedUnits units_moved(const Plan& plan) {
  MovedUnits units;
  for (const PlanGroup& group : plan.moved) units.insert(group.group);
  return units;
}

}  // namespace

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

namespace {

Prices scaled_prices(const MeasuredLoads& measured, double trainer_scale, double worker_scale) {
  Prices prices = link_prices(measured.workers, measured.link);
  prices.trainer_scale = trainer_scale;
  prices.worker_scale = worker_scale;
  return prices;
}

}  // namespace

void Repricer::note_call(const Cut& cut, uint32_t weight) {
  const auto found = std::find_if(called_.begin(), called_.end(), [&](const auto& item) { return item.first == cut; });
  if (found != called_.end())
    found->second += weight;
  else
    called_.emplace_back(cut, weight);
}

bool Repricer::take_window(uint32_t cpus) {
  // A cut with few calls, such as for a smaller last batch, has little influence on the step time.
  std::vector<Cut> cuts, moving;
  for (const auto& [cut, count] : called_) {
    if (2 * count < meter_->step_count()) continue;
    cuts.push_back(cut);
    if (cut->has_suffix) moving.push_back(cut);
  }
  const auto is_timing = [](const Cut& cut) { return cut->pricing->wants_timed_calls(); };
  if (std::any_of(moving.begin(), moving.end(), is_timing)) return false;
  const std::optional<MeasuredLoads> measured = meter_->measured(/*needs_boundary=*/!moving.empty(), cpus);
  meter_->clear();
  called_.clear();
  if (!measured || cuts.empty()) return false;
  double planned_s = 0;
  for (const Cut& cut : moving) {
    cut->pricing->learn_scale(*cut->plans, measured->workers);
    planned_s += planned_seconds(*cut, *measured, 1).worker_s;
  }
  if (planned_s > 0 && measured->prefix_s > 0) worker_scale_ = clamped_scale(measured->prefix_s / planned_s);
  StageSeconds planned;
  for (const Cut& cut : cuts) planned += planned_seconds(*cut, *measured, worker_scale_);
  const Basis basis{.trainer_s = std::max(0.0, measured->trainer_s - planned.trainer_s),
                    .worker_s = std::max(0.0, measured->fetch_s - measured->prefix_s),
                    .link_s = std::max(0.0, measured->bytes / measured->link.bytes_per_s - planned.link_s),
                    .prefix_scale = worker_scale_,
                    .workers = measured->workers,
                    .step_s = measured->step_s};
  now_ = {*measured, basis};
  if (trial_ && std::find(cuts.begin(), cuts.end(), trial_->new_cut) == cuts.end())
    trial_.reset();  // it was dropped, and replanned
  shifted_windows_ = basis_ && has_shifted(*basis_, basis) ? shifted_windows_ + 1 : 0;
  const bool is_shifted = shifted_windows_ >= limits_.shifted_windows;
  if (is_shifted)
    for (const Cut& cut : cuts) {
      cut->pricing->left.clear();
      cut->pricing->is_held = false;
    }
  if (!basis_ || trial_ || is_shifted) {
    basis_ = basis;
    shifted_windows_ = 0;
    due_ = cuts;
  }
  return true;
}

std::optional<Repricer::Change> Repricer::change_of(const Cut& cut) {
  const auto due = std::find(due_.begin(), due_.end(), cut);
  if (due == due_.end()) return std::nullopt;
  if (trial_ && trial_->new_cut != cut) return std::nullopt;  // it waits for the result of the trial
  due_.erase(due);
  if (trial_) {
    if (goes_back()) return Change{.goes_back = true};
    if (trial_) return std::nullopt;
  }
  const std::optional<Prices> prices = price(*cut);
  if (!prices) return std::nullopt;
  return Change{.prices = prices};
}

bool Repricer::changed(const Cut& old_cut, const Cut& new_cut) {
  PENSTOCK_ASSERT(now_.has_value());
  GraphPricing& pricing = *new_cut->pricing;
  ++pricing.changes;
  const bool is_back = trial_ && trial_->old_cut == new_cut;
  if (is_back) {
    // The loads measured with the other plan contain the error in its price, so they cannot serve as a basis for
    // comparison. The measured worker time for it can.
    basis_ = trial_->basis;
    basis_->prefix_scale = worker_scale_;
    shifted_windows_ = 0;
    trial_.reset();
  } else {
    trial_ = Trial{.old_cut = old_cut,
                   .new_cut = new_cut,
                   .before = now_->first,
                   .basis = now_->second,
                   .windows_left = limits_.trial_windows};
    pricing.left.push_back(units_moved(old_cut->plans->chosen()));
    pricing.begin_timed_calls();
  }
  due_.clear();
  called_.clear();
  meter_->forget();
  show(*new_cut, new_cut->plans->prices());
  return is_back;
}

void Repricer::give_up(const Cut& cut) {
  cut->pricing->is_held = true;
  show(*cut, cut->plans->prices());
}

std::string Repricer::text() const {
  const auto& [measured, basis] = *now_;
  std::array<char, 128> beside{};
  std::snprintf(beside.data(), beside.size(),
                "; beyond the plan %.3g ms of the trainer and %.3g ms of a worker, which takes %.3g times as long as "
                "calibrated",
                basis.trainer_s * 1e3, basis.worker_s * 1e3, basis.prefix_scale);
  return measured.text() + beside.data();
}

bool Repricer::has_shifted(const Basis& before, const Basis& now) const {
  const double floor = limits_.noticeable * std::max(before.step_s, now.step_s);
  const auto ratio = [&](double a, double b) { return std::max(b, floor) / std::max(a, floor); };
  const auto differs = [&](double of) { return !(1 / limits_.shift < of && of < limits_.shift); };
  return before.workers != now.workers || differs(ratio(before.trainer_s, now.trainer_s)) ||
         differs(ratio(before.worker_s, now.worker_s)) || differs(ratio(before.link_s, now.link_s)) ||
         differs(now.prefix_scale / before.prefix_scale);
}

// Decides whether to take back the plan of the trial: if its steps are longer than before, or if the previous plan
// promises shorter ones. The trial continues while neither is known; otherwise it ends.
bool Repricer::goes_back() {
  const auto& [measured, basis] = *now_;
  Trial trial = *std::exchange(trial_, std::nullopt);
  const double more_s = measured.step_s - trial.before.step_s;
  const double error_s = std::hypot(measured.step_error_s, trial.before.step_error_s);
  const bool is_first = trial.windows_left == limits_.trial_windows;  // later the machine may have changed, too
  const bool is_worse = is_first && more_s > std::max(limits_.loss_max * trial.before.step_s, 2 * error_s);
  // Check whether the steps are longer for another reason than the plan: the workers' other work shows it.
  Basis beside = basis;
  beside.trainer_s = trial.basis.trainer_s;
  beside.prefix_scale = trial.basis.prefix_scale;
  if (!(is_worse && !has_shifted(trial.basis, beside)) && !was_mispriced(trial)) {
    // Later windows give no new information about a plan without moved units.
    if (trial.new_cut->has_suffix && --trial.windows_left > 0) trial_ = std::move(trial);
    return false;
  }
  trial.new_cut->pricing->is_held = true;
  trial_ = std::move(trial);  // until `changed` has seen that it was taken back
  return true;
}

// Whether the previous plan promises shorter steps than the present one, now that the present one's cost to the workers
// and its saving for the trainer are measured. All of these are from one window, so a machine that became slower or
// faster between two windows has no influence.
bool Repricer::was_mispriced(const Trial& trial) const {
  const Prices prices = prices_with(*trial.new_cut);
  const auto step_s = [&](const PricedCut& cut) { return cut.plans->step(cut.plans->chosen(), prices).step_s; };
  return step_s(*trial.old_cut) < step_s(*trial.new_cut) * (1 - limits_.return_min);
}

StageSeconds Repricer::planned_seconds(const PricedCut& cut, const MeasuredLoads& measured, double worker_scale) const {
  return cut.plans->seconds(cut.plans->chosen(), scaled_prices(measured, cut.pricing->trainer_scale(), worker_scale));
}

// Returns the prices while `cut` is in use.
Prices Repricer::prices_with(const PricedCut& cut) const {
  const MeasuredLoads& measured = now_->first;
  Prices prices = scaled_prices(measured, cut.pricing->trainer_scale(), worker_scale_);
  const StageSeconds seconds = cut.plans->seconds(cut.plans->chosen(), prices);
  const bool has_enough_cpus = measured.cpus > measured.workers;
  prices.loads = Loads{.trainer_s = std::max(0.0, measured.trainer_s - seconds.trainer_s),
                       .worker_s = std::max(0.0, measured.fetch_s - seconds.worker_s),
                       .link_s = std::max(0.0, measured.bytes / measured.link.bytes_per_s - seconds.link_s),
                       .cpus = has_enough_cpus ? 0.0 : measured.cpus};
  return prices;
}

// Prices a cut by its measurements. Returns the prices for planning another cut, if one promises enough.
std::optional<Prices> Repricer::price(PricedCut& cut) {
  GraphPricing& pricing = *cut.pricing;
  const Prices prices = prices_with(cut);
  ++pricing.times_priced;
  show(cut, prices);
  if (pricing.is_held || pricing.changes >= limits_.changes_max) return std::nullopt;
  const Plan other = cut.plans->chosen_by(prices);
  const MovedUnits moved = units_moved(other);
  if (moved == units_moved(cut.plans->chosen())) return std::nullopt;
  if (std::find(pricing.left.begin(), pricing.left.end(), moved) != pricing.left.end()) return std::nullopt;
  if (*other.step_s > cut.shown->step.step_s * (1 - limits_.gain_min)) return std::nullopt;
  return prices;
}

// Updates the price that the loader shows: computed by these prices, or unchanged if they have no loads.
void Repricer::show(PricedCut& cut, const Prices& prices) const {
  if (prices.loads)
    cut.shown = ShownPrice{.step = cut.plans->step(cut.plans->chosen(), prices), .workers = prices.worker_count};
  if (!cut.shown) return;
  cut.shown->times = cut.pricing->times_priced;
  cut.shown->changes = cut.pricing->changes;
  cut.shown->is_held = cut.pricing->is_held;
}

}  // namespace penstock::graph
