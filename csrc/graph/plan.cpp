// SPDX-License-Identifier: Apache-2.0
#include "graph/plan.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <optional>
#include <tuple>
#include <utility>

#include "graph/cut_model.h"

namespace penstock::graph {
namespace {

constexpr double kSame = 1e-9;  // of a sum: smaller differences are due to rounding to picoseconds

// A point in the plane of the corners: the seconds of the trainer, and of the stage that feeds it.
struct Point {
  double trainer_s;
  double feeding_s;
};

// Finds the corners between the choices that are best for the trainer and for the stage that feeds it.
class CornerSearch {
 public:
  explicit CornerSearch(const CutModel& model) : model_(model) {}

  std::vector<Corner> run() {
    // At the ends the other stage still has a small weight; otherwise a choice could be taken that is worse in the
    // other stage without being better in this one.
    Corner first = solve(1 - kEnd);
    Corner last = solve(kEnd);
    std::vector<Corner> found;
    if (first.choice != last.choice) {
      found.push_back(first);
      between(first, last, found);
    }
    found.push_back(std::move(last));
    return found;
  }

 private:
  static constexpr double kEnd = 1e-4;

  Point point(const Corner& corner) const {
    return {corner.seconds.trainer_s, corner.seconds.worker_s / model_.prices().worker_count + corner.seconds.link_s};
  }

  Corner solve(double trainer_weight) {
    ++solved_count_;
    Choice choice = model_.cheapest({trainer_weight, 1 - trainer_weight, 1 - trainer_weight});
    StageSeconds seconds = model_.cut(choice).seconds;
    return {std::move(choice), seconds};
  }

  // Appends the corners between two others, in their order.
  void between(const Corner& first, const Corner& last, std::vector<Corner>& found) {
    if (solved_count_ >= kCornerCutsMax) return;
    const Point a = point(first);
    const Point b = point(last);
    const double more_trainer_s = b.trainer_s - a.trainer_s;
    const double more_feeding_s = a.feeding_s - b.feeding_s;
    if (more_trainer_s <= 0 || more_feeding_s <= 0) return;
    const double weight = more_feeding_s / (more_trainer_s + more_feeding_s);
    Corner middle = solve(weight);
    const auto sum = [&](const Point& p) { return weight * p.trainer_s + (1 - weight) * p.feeding_s; };
    if (sum(point(middle)) >= sum(a) * (1 - kSame)) return;
    between(first, middle, found);
    found.push_back(middle);
    between(middle, last, found);
  }

  const CutModel& model_;
  int solved_count_ = 0;
};

// Examines the corners, and the choices on the way from the best corner to its neighbours.
class FastestSearch {
 public:
  FastestSearch(const CutModel& model, const Loads& loads) : model_(model), loads_(loads), draws_(model.draws()) {}

  Choice run() {
    const std::vector<Corner> found = corners(model_);
    consider(draws_);
    consider(model_.shrink_to_valid(model_.everything()));
    size_t fastest = 0;
    for (size_t corner = 0; corner < found.size(); ++corner)
      if (rank(found[corner].choice) < rank(found[fastest].choice)) fastest = corner;
    consider(found[fastest].choice);
    for (const size_t other : {fastest - 1, fastest + 1}) {
      if (other >= found.size()) continue;  // past either end
      walk(found[fastest].choice, found[other].choice);
      walk(found[other].choice, found[fastest].choice);
    }
    return best_;
  }

 private:
  using Rank = std::tuple<double, double, ptrdiff_t>;  // the step, all seconds, and how many units move

  Rank rank(const Choice& choice) const {
    const StageSeconds seconds = model_.cut(choice).seconds;
    const auto picoseconds = [](double s) { return std::round(s * 1e12); };  // equal sums are equal
    return {picoseconds(step_seconds(model_.prices(), loads_, seconds)),
            picoseconds(seconds.trainer_s + seconds.worker_s / model_.prices().worker_count + seconds.link_s),
            std::count(choice.begin(), choice.end(), true)};
  }

  void consider(const Choice& choice) {
    for (size_t unit = 0; unit < choice.size(); ++unit)
      if (draws_[unit] && !choice[unit]) return;
    const Rank its = rank(choice);
    if (!best_.empty() && best_rank_ <= its) return;
    best_ = choice;
    best_rank_ = its;
  }

  // Changes `choice` into `other` one unit at a time, in program order if more units are to move, otherwise in reverse
  // order, so that the choice is valid at each step or soon after.
  void walk(Choice choice, const Choice& other) {
    const auto moving = static_cast<size_t>(std::count(choice.begin(), choice.end(), true));
    const bool grows = static_cast<size_t>(std::count(other.begin(), other.end(), true)) > moving;
    for (size_t step = 0; step < choice.size() && walked_count_ < kWalkMax; ++step) {
      const size_t unit = grows ? step : choice.size() - 1 - step;
      if (choice[unit] == other[unit]) continue;
      ++walked_count_;
      choice[unit] = other[unit];
      if (choice[unit]) {
        auto grown = model_.grow_to_valid(choice);
        if (!grown) return;
        choice = std::move(*grown);
      } else {
        choice = model_.shrink_to_valid(std::move(choice));
      }
      consider(choice);
    }
  }

  const CutModel& model_;
  const Loads& loads_;
  const Choice draws_;  // units that move in any case
  Choice best_;
  Rank best_rank_;
  int walked_count_ = 0;
};

}  // namespace

std::vector<Corner> corners(const CutModel& model) { return CornerSearch(model).run(); }

Choice fastest(const CutModel& model, const Loads& loads) { return FastestSearch(model, loads).run(); }

namespace {

// Explaining a group prices another cut. For a program with more groups than this the explanation is general.
constexpr size_t kExplainedMax = 256;

std::string milliseconds(double seconds) {
  std::array<char, 32> text;
  std::snprintf(text.data(), text.size(), "%.3g ms", seconds * 1e3);
  return text.data();
}

class Planner {
 public:
  Planner(const Graph& graph, std::span<const Verdict> verdicts, const Calibration& calibration, const Prices& prices,
          CutMode mode)
      : graph_(graph),
        verdicts_(verdicts),
        prices_(prices),
        mode_(mode),
        model_(graph, verdicts, calibration, prices),
        maximal_(model_.shrink_to_valid(model_.everything())),
        choice_(choose()),
        cut_(model_.cut(choice_)) {}

  Plan plan() {
    Plan plan;
    for (uint32_t unit = 0; unit < model_.units().size(); ++unit) {
      const bool is_moved = !cut_.runs_in_trainer[unit];
      (is_moved ? plan.moved : plan.kept).push_back(describe(unit, is_moved));
    }
    plan.boundary = cut_.boundary;
    for (const ValueId value : cut_.boundary) plan.boundary_names.push_back(graph_.value_names[value]);
    for (const Input& input : graph_.inputs)
      if (std::binary_search(cut_.raw.begin(), cut_.raw.end(), input.value))
        plan.raw_leaves.push_back(input.leaf_index);
    std::sort(plan.raw_leaves.begin(), plan.raw_leaves.end());
    plan.raw_bytes = model_.raw_bytes();
    plan.boundary_bytes = cut_.boundary_bytes;
    plan.sent_bytes = cut_.sent_bytes;
    plan.maximal_bytes = model_.cut(maximal_).boundary_bytes;
    for (uint32_t node = 0; node < graph_.nodes.size(); ++node)
      if (cut_.runs_in_worker[node]) plan.worker_s += model_.worker_node_s(node);
    for (const PlanGroup& group : plan.kept) plan.trainer_s += group.trainer_s;
    plan.seconds = cut_.seconds;
    if (prices_.loads) plan.step_s = step_seconds(prices_, *prices_.loads, cut_.seconds);
    return plan;
  }

 private:
  Choice choose() {
    switch (mode_) {
      case CutMode::kAuto: return choose_by_price();
      case CutMode::kMaximal: return maximal_;
      case CutMode::kNone: break;
    }
    return model_.nothing();
  }

  Choice choose_by_price() {
    Choice best = prices_.loads ? fastest(model_, *prices_.loads) : model_.cheapest();
    Choice nothing = model_.nothing();
    if (best == nothing || model_.draws() != nothing) return best;
    const double gain_s = price_s(nothing) - price_s(best);
    if (gain_s >= prices_.cut_s) return best;
    declined_gain_s_ = gain_s;
    return nothing;
  }

  double price_s(const Choice& choice) const {
    const Cut cut = model_.cut(choice);
    if (prices_.loads) return step_seconds(prices_, *prices_.loads, cut.seconds);
    return static_cast<double>(model_.price(cut)) * 1e-12;
  }

  PlanGroup describe(uint32_t unit_index, bool is_moved) {
    const Unit& unit = model_.units()[unit_index];
    PlanGroup group;
    group.group = unit.group;
    group.label = graph_.nodes[unit.nodes.front()].label;
    group.nodes = unit.nodes;
    group.replicated = unit.kind == UnitKind::kReplicable;
    group.level = Level::kConst;
    for (const uint32_t node : unit.nodes) {
      group.operators.push_back(graph_.nodes[node].op);
      group.level = std::max(group.level, verdicts_[node].level);
      group.worker_s += model_.worker_node_s(node);
      if (unit.kind != UnitKind::kFixed) group.trainer_s += model_.trainer_node_s(node);
    }
    group.reason = reason(unit_index, is_moved);
    return group;
  }

  std::string reason(uint32_t unit_index, bool is_moved) {
    const Unit& unit = model_.units()[unit_index];
    const std::string& effect = verdicts_[unit.deciding_node].reason;
    switch (unit.kind) {
      case UnitKind::kFixed: {
        const bool is_mixed = std::any_of(unit.nodes.begin(), unit.nodes.end(),
                                          [&](uint32_t node) { return !must_stay(verdicts_[node]); });
        return is_mixed ? "part of it must stay: " + effect : effect;
      }
      case UnitKind::kReplicable:
        return effect + (is_moved ? ", and the trainer no longer needs it" : ", so each side computes its own");
      case UnitKind::kFree: break;
    }
    if (is_moved) return effect;
    if (mode_ == CutMode::kNone) return "cut=\"none\" is set";
    return reason_to_keep(unit_index);
  }

  // A free unit that stays: it is forced to, or it is cheaper there.
  std::string reason_to_keep(uint32_t unit_index) {
    if (!maximal_[unit_index])
      return "it could move, but then a number or list would have to be sent, or a value from the trainer would be "
             "required";
    if (declined_gain_s_)
      return "it could move, but all profitable moves together save only " + milliseconds(*declined_gain_s_) +
             " per batch, and cutting costs the trainer " + milliseconds(prices_.cut_s);
    std::string general = "it could move, but is cheaper in the trainer";
    if (++explained_count_ > kExplainedMax) return general;
    Choice choice = choice_;
    choice[unit_index] = true;
    const auto grown = model_.grow_to_valid(std::move(choice));
    if (!grown) return general;
    const Cut other = model_.cut(*grown);
    if (prices_.loads) {
      const double step_s = step_seconds(prices_, *prices_.loads, cut_.seconds);
      const double other_s = step_seconds(prices_, *prices_.loads, other.seconds);
      const std::string steps = "a step would take " + milliseconds(other_s) + " instead of " + milliseconds(step_s);
      return (other_s > step_s ? general + ": with it moved " : "it could move, and ") + steps + "; " +
             bytes_change(other);
    }
    const Ticks more = model_.price(other) - model_.price(cut_);
    if (more == 0) return "it could move, at the same price; " + bytes_change(other);
    return general + ": moving it would cost " + milliseconds(static_cast<double>(more) * 1e-12) + " more per batch; " +
           bytes_change(other);
  }

  std::string bytes_change(const Cut& other) const {
    return std::to_string(other.boundary_bytes) + " bytes would be sent instead of " +
           std::to_string(cut_.boundary_bytes);
  }

  const Graph& graph_;
  std::span<const Verdict> verdicts_;
  const Prices& prices_;
  const CutMode mode_;
  const CutModel model_;
  const Choice maximal_;
  std::optional<double> declined_gain_s_;  // of a cut that would save less than a cut costs
  const Choice choice_;
  const Cut cut_;
  size_t explained_count_ = 0;
};

}  // namespace

Result<CutMode> cut_mode_from_name(std::string_view name) {
  if (name == "auto") return CutMode::kAuto;
  if (name == "maximal") return CutMode::kMaximal;
  if (name == "none") return CutMode::kNone;
  return Fault{Errc::kMismatch, "cut is \"" + std::string(name) + "\", expected \"auto\", \"maximal\" or \"none\""};
}

namespace {

Result<void> check(const Graph& graph, std::span<const Verdict> verdicts, const Calibration& calibration,
                   const Prices& prices) {
  if (auto checked = check_prices(prices); !checked) return checked;
  const auto differs = [](const char* what, size_t seen, size_t expected) {
    return Fault{Errc::kMismatch, "the plan got " + std::to_string(seen) + " " + what + " for a graph with " +
                                      std::to_string(expected) + "; pass values of the same graph"};
  };
  if (verdicts.size() != graph.nodes.size()) return differs("verdicts", verdicts.size(), graph.nodes.size());
  if (calibration.node_s.size() != graph.nodes.size())
    return differs("operator times", calibration.node_s.size(), graph.nodes.size());
  if (!calibration.trainer_node_s.empty() && calibration.trainer_node_s.size() != graph.nodes.size())
    return differs("operator times of the trainer", calibration.trainer_node_s.size(), graph.nodes.size());
  if (calibration.values.size() != graph.value_names.size())
    return differs("value sizes", calibration.values.size(), graph.value_names.size());
  return {};
}

}  // namespace

Result<Plan> make_plan(const Graph& graph, std::span<const Verdict> verdicts, const Calibration& calibration,
                       const Prices& prices, CutMode mode) {
  if (const auto checked = check(graph, verdicts, calibration, prices); !checked) return checked.error();
  return Planner(graph, verdicts, calibration, prices, mode).plan();
}

Result<StageSeconds> plan_seconds(const Graph& graph, std::span<const Verdict> verdicts, const Calibration& calibration,
                                  const Prices& prices, const Plan& plan) {
  if (const auto checked = check(graph, verdicts, calibration, prices); !checked) return checked.error();
  const CutModel model(graph, verdicts, calibration, prices);
  std::vector<bool> is_moved(graph.nodes.size());
  for (const PlanGroup& group : plan.moved)
    for (const uint32_t node : group.nodes) {
      if (node >= is_moved.size())
        return Fault{Errc::kMismatch, "the plan belongs to another graph; pass the plan of this graph"};
      is_moved[node] = true;
    }
  Choice choice = model.nothing();
  for (size_t unit = 0; unit < choice.size(); ++unit)
    choice[unit] = model.units()[unit].kind == UnitKind::kFree && is_moved[model.units()[unit].nodes.front()];
  return model.cut(choice).seconds;
}

}  // namespace penstock::graph
