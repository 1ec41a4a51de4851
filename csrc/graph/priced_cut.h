// SPDX-License-Identifier: Apache-2.0
#pragma once
// A cut that is in use, with all measurements of its graph: timed calls, their scale, the changes so far.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "graph/priced_plans.h"

namespace penstock::graph {

// A call of a graph that is timed: the graph as a whole, or only its suffix.
enum class TimedCall : uint8_t { kWhole, kSuffix };

// The units of the user's program that a plan moves, which distinguish plans of one graph.
using MovedUnits = std::set<std::optional<uint32_t>>;
MovedUnits units_moved(const Plan& plan);

// The measurements of one graph, which continue from one cut to the next. Thread-compatible.
class GraphPricing {
 public:
  // How many calls are timed, every other one of the whole graph, and how many run before the first.
  static constexpr int kTimedCalls = 12;
  static constexpr int kCallsBefore = 4;

  bool wants_timed_calls() const { return next_call_ < kTimedCalls; }
  // The part to time in this call, if any.
  std::optional<TimedCall> next_timed_call();
  // Restarts timing calls, for another cut.
  void begin_timed_calls();
  void note(TimedCall call, double seconds) { seconds_[static_cast<size_t>(call)].push_back(seconds); }
  // Sets the trainer's scale from the timed calls, once there are some: the trainer's seconds for the movable nodes,
  // divided by the calibrated seconds.
  void learn_scale(const PricedPlans& plans, uint32_t workers);
  double trainer_scale() const { return trainer_scale_; }

  uint32_t times_priced = 0;
  uint32_t changes = 0;            // of the plan
  bool is_held = false;            // a change was taken back, or cannot be made; until loads shift
  std::vector<MovedUnits> left{};  // plans left since the loads shifted

 private:
  int next_call_ = -kCallsBefore;
  std::array<std::vector<double>, 2> seconds_{};  // by TimedCall
  double trainer_scale_ = 1;
};

// Keeps a scale within the believable range: 0.05 to 20.
double clamped_scale(double scale);

// The price of a plan, as shown by the loader.
struct ShownPrice {
  uint32_t times = 0;    // how often the plan was priced by measurements
  uint32_t changes = 0;  // of the plan
  StepSeconds step{};
  double workers = 0;
  bool is_held = false;
};

// Thread-compatible.
struct PricedCut {
  std::shared_ptr<const PricedPlans> plans;
  std::shared_ptr<GraphPricing> pricing;
  bool has_suffix = false;  // the plan moves something
  std::optional<ShownPrice> shown = {};
};

}  // namespace penstock::graph
