// SPDX-License-Identifier: Apache-2.0
#pragma once
// Reprices the plans of an offloaded model while its loader runs.
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

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "graph/load_meter.h"
#include "graph/priced_cut.h"

namespace penstock::graph {

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

// Each offloaded model has one. Thread-compatible. Cuts are distinguished by their addresses.
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
