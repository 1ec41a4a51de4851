// SPDX-License-Identifier: Apache-2.0
#pragma once
// The Repricer reprices the plans of an offloaded model while its loader runs. PricedPlans holds the plans of one graph
// under one calibration, GraphPricing all measurements of a graph, and PricedCut a cut in use with both.
//
// Calibration only times the operators. Which side of the pipeline is slower only shows when the pipeline runs. So a
// window of steps is measured. The part of it that the plan explains is subtracted, and the rest is the load for which
// another plan may be better (price.h). For this, a few calls of the whole graph are timed, alternating with calls of
// its suffix. The difference is the trainer's gain by the cut, with its allocator and threads. If the loads shift
// later, plans are repriced.
//
// Changes of plans are bounded:
//
// - A new plan must promise steps that are shorter by `gain_min`.
// - A new plan is taken back if its steps are immediately longer, or if the measurements of one of its first
//   `trial_windows` windows show that steps would be shorter with the previous plan.
// - After a plan was taken back the graph keeps its plan until the loads have shifted.
// - A plan that was left is not chosen again until the loads have shifted.
// - The plan of a graph changes at most `changes_max` times.
//
// Training losses are the same with every plan, so a change only affects speed.

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "graph/effects.h"
#include "graph/ir.h"
#include "graph/load_meter.h"
#include "graph/plan.h"
#include "graph/price.h"

namespace penstock::graph {

// One graph with its verdicts and its calibration, and the plans made for it: all that is needed to price again.
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

// A call of a graph that is timed: the graph as a whole, or only its suffix.
enum class TimedCall : uint8_t { kWhole, kSuffix };

// The units of the user's program that a plan moves, which distinguish plans of one graph.
using MovedUnits = std::set<std::optional<uint32_t>>;

// The measurements of one graph, which continue from one cut to the next: timed calls, their scale, the changes so far.
// Thread-compatible.
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

// The price of a plan, as shown by the loader.
struct ShownPrice {
  uint32_t times = 0;    // how often the plan was priced by measurements
  uint32_t changes = 0;  // of the plan
  StepSeconds step{};
  double workers = 0;
  bool is_held = false;
};

// A cut that is in use, with all measurements of its graph. Thread-compatible.
struct PricedCut {
  std::shared_ptr<const PricedPlans> plans;
  std::shared_ptr<GraphPricing> pricing;
  bool has_suffix = false;  // the plan moves something
  std::optional<ShownPrice> shown = {};
};

struct RepricingLimits {
  size_t window_steps = 24;
  double window_s = 0.5;  // and at least this long: other load on a machine occurs in bursts
  // A load counts as shifted if it is this many times longer or shorter in a number of consecutive windows.
  double shift = 1.5;
  uint32_t shifted_windows = 2;
  double noticeable = 0.1;     // of a step: a smaller load never counts as shifted
  double gain_min = 0.03;      // of a step, promised
  double loss_max = 0.03;      // of a step, measured, and twice its standard error
  double return_min = 0.03;    // of a step, promised by the previous plan, once the new one was measured
  uint32_t changes_max = 8;    // of one graph's plan
  uint32_t trial_windows = 4;  // in each of which a new plan may be taken back
};

// Decides when an offloaded model is priced again, and which of its cuts is replaced. Each offloaded model has one.
// Cuts are distinguished by their addresses. Thread-compatible.
class Repricer {
 public:
  using Cut = std::shared_ptr<PricedCut>;
  // The decision for one cut.
  struct Change {
    bool goes_back = false;          // to the plan that was left last
    std::optional<Prices> prices{};  // prices for planning another one
  };

  explicit Repricer(std::shared_ptr<LoadMeter> meter, const RepricingLimits& limits = {})
      : meter_(std::move(meter)), limits_(limits) {}

  // Call when the cut is called. The call represents `weight` calls.
  void note_call(const Cut& cut, uint32_t weight);
  // Whether the meter has recorded a window.
  bool is_window_due() const { return meter_->has_seen(limits_.window_steps, limits_.window_s); }
  // Reads the measurements, made with `cpus` for the trainer and its workers, and notes which cuts are due for pricing.
  // Returns whether there is new information for pricing.
  bool take_window(uint32_t cpus);
  // Returns how to replace the cut in use, if another one promises to be better, or has been; otherwise none.
  std::optional<Change> change_of(const Cut& cut);
  // Call after one cut was replaced by another, which is in use from the next batches on. Returns whether the new cut
  // is the one that was left.
  bool changed(const Cut& old_cut, const Cut& new_cut);
  // Call if the other plan cannot be applied.
  void give_up(const Cut& cut);

  // The measurements of the newest window. Call only after the first window.
  const MeasuredLoads& measured() const { return now_->first; }
  std::string text() const;

 private:
  // Loads at the time when plans were last priced.
  struct Basis {
    double trainer_s = 0;
    double worker_s = 0;
    double link_s = 0;
    double prefix_scale = 1;
    uint32_t workers = 1;
    double step_s = 0;
  };
  // A plan that is in use on trial, until the length of its steps is known.
  struct Trial {
    Cut old_cut;
    Cut new_cut;
    MeasuredLoads before;
    Basis basis;
    uint32_t windows_left = 0;
  };

  bool has_shifted(const Basis& before, const Basis& now) const;
  bool goes_back();
  bool was_mispriced(const Trial& trial) const;
  StageSeconds planned_seconds(const PricedCut& cut, const MeasuredLoads& measured, double worker_scale) const;
  Prices prices_with(const PricedCut& cut) const;
  std::optional<Prices> price(PricedCut& cut);
  void show(PricedCut& cut, const Prices& prices) const;

  const std::shared_ptr<LoadMeter> meter_;
  const RepricingLimits limits_;
  double worker_scale_ = 1;
  std::optional<Basis> basis_;
  std::optional<std::pair<MeasuredLoads, Basis>> now_;
  uint32_t shifted_windows_ = 0;
  std::optional<Trial> trial_;
  std::vector<std::pair<Cut, size_t>> called_;  // since the last window, and how often
  std::vector<Cut> due_;                        // to be priced when they are called next
};

}  // namespace penstock::graph
