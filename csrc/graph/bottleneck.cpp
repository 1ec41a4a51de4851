// SPDX-License-Identifier: Apache-2.0
#include "graph/bottleneck.h"

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

namespace penstock::graph {
namespace {

constexpr double kSame = 1e-9;  // of a sum: smaller differences are due to rounding to picoseconds

// A point in the plane of the corners: the seconds of the trainer, and of the stage that feeds it.
struct Point {
  double trainer_s;
  double feeding_s;
};

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

}  // namespace penstock::graph
