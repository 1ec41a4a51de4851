// SPDX-License-Identifier: Apache-2.0
// The repricer on a pipeline whose seconds are told to it: one unit may move, and a second in the trainer.

#include "graph/repricer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "graph/ir_text.h"

namespace penstock::graph {
namespace {

constexpr double kMovingS = 10e-3;  // of the unit that may move

Graph one_that_may_move() {
  Graph graph = parse_graph(
                    "penstock-ir 1\n"
                    "input %x0 leaf 0 float32 [8]\n"
                    "input %p0 state \"w\" float32 [8]\n"
                    "%a = aten::sin(%x0) group 0 \"sin at m.py:1\"\n"
                    "%b = aten::mul.Tensor(%a, %p0) group 1 \"mul at m.py:2\"\n"
                    "output %b\n")
                    .value();
  graph.traits.resize(2);
  for (Traits& traits : graph.traits) {
    traits.purity = Purity::kPure;
    traits.result_kinds = {ValueKind::kTensor};
  }
  return graph;
}

std::shared_ptr<PricedPlans> plans_of(CutMode mode, const Prices& prices) {
  Graph graph = one_that_may_move();
  std::vector<Verdict> verdicts = analyse_effects(graph, {});
  Calibration calibration;
  calibration.node_s = {kMovingS, 0};
  for (uint32_t value = 0; value < graph.value_names.size(); ++value) calibration.values.push_back({32, value});
  return std::make_shared<PricedPlans>(
      PricedPlans::make(std::move(graph), std::move(verdicts), std::move(calibration), prices, mode).value());
}

// A training whose steps take as long as their stages: the trainer and one worker, side by side.
class Pipeline {
 public:
  explicit Pipeline(const RepricingLimits& limits = {}) : repricer_(meter_, limits) {
    cut_ = cut_of(CutMode::kMaximal, local_prices(1));
    meter_->begin(1, 0);
  }

  const Repricer::Cut& cut() const { return cut_; }
  bool moves() const { return cut_->has_suffix; }

  // Steps of so many seconds of trainer and worker beside the operator that may move. That one takes `kept_s` in the
  // trainer, which the timed calls do not show, and `moved_s` in the worker.
  void run(int steps, double trainer_s, double worker_s, double kept_s = kMovingS, double moved_s = kMovingS) {
    for (int step = 0; step < steps; ++step) {
      const double trainer = trainer_s + (moves() ? 0 : kept_s);
      const double worker = worker_s + (moves() ? moved_s : 0);
      const double step_s = std::max(trainer, worker);
      work_.batches += 1;
      work_.with_boundary += moves() ? 1 : 0;
      work_.fetch_s += worker;
      work_.prefix_s += moves() ? moved_s : 0;
      meter_->note(now_s_ - (step_s - trainer), now_s_, work_);
      now_s_ += step_s;
      call();
    }
  }

 private:
  static Repricer::Cut cut_of(CutMode mode, const Prices& prices, const Repricer::Cut& like = nullptr) {
    auto plans = plans_of(mode, prices);
    const bool moves = !plans->chosen().moved.empty();
    return std::make_shared<PricedCut>(PricedCut{.plans = std::move(plans),
                                                 .pricing = like ? like->pricing : std::make_shared<GraphPricing>(),
                                                 .has_suffix = moves});
  }

  void call() {
    if (moves() && cut_->pricing->wants_timed_calls()) {
      if (const auto timed = cut_->pricing->next_timed_call())
        cut_->pricing->note(*timed, 1e-3 + (*timed == TimedCall::kWhole ? kMovingS : 0));
      if (!cut_->pricing->wants_timed_calls()) meter_->forget();
    }
    repricer_.note_call(cut_, 1);
    if (repricer_.is_window_due()) repricer_.take_window(/*cpus=*/4);
    const auto change = repricer_.change_of(cut_);
    if (!change) return;
    const Repricer::Cut before = cut_;
    cut_ = change->goes_back ? left_ : cut_of(CutMode::kAuto, *change->prices, cut_);
    left_ = before;
    repricer_.changed(before, cut_);
  }

  const std::shared_ptr<LoadMeter> meter_ = std::make_shared<LoadMeter>();
  Repricer repricer_;
  Repricer::Cut cut_;
  Repricer::Cut left_;
  DeliveredWork work_;
  double now_s_ = 0;
};

TEST(Repricer, AMoveThatHelpsStays) {
  Pipeline pipeline;
  pipeline.run(400, 40e-3, 1e-3);
  EXPECT_TRUE(pipeline.moves());
  EXPECT_EQ(pipeline.cut()->pricing->changes, 0u);
  EXPECT_GT(pipeline.cut()->shown->times, 0u);
  EXPECT_NEAR(pipeline.cut()->shown->step.step_s, 40e-3, 1e-3);
}

TEST(Repricer, AMoveComesBackWhenTheWorkersAreTheSlowerSide) {
  Pipeline pipeline;
  pipeline.run(400, 1e-3, 60e-3);
  EXPECT_FALSE(pipeline.moves());
  EXPECT_EQ(pipeline.cut()->pricing->changes, 1u);
  EXPECT_FALSE(pipeline.cut()->shown->is_held);
}

TEST(Repricer, AMoveComesBackWhenTheLoadsShiftLater) {
  Pipeline pipeline;
  pipeline.run(200, 40e-3, 1e-3);
  EXPECT_TRUE(pipeline.moves());
  pipeline.run(300, 1e-3, 60e-3);
  EXPECT_FALSE(pipeline.moves());
}

TEST(Repricer, WhatStayedMovesWhenTheTrainerBecomesTheSlowerSide) {
  Pipeline pipeline;
  pipeline.run(300, 1e-3, 60e-3);
  EXPECT_FALSE(pipeline.moves());
  pipeline.run(400, 60e-3, 1e-3);
  EXPECT_TRUE(pipeline.moves());
  EXPECT_GE(pipeline.cut()->pricing->changes, 2u);
}

TEST(Repricer, APlanWhoseStepsTurnOutLongerIsTakenBackAndTheGraphKeepsItsPlan) {
  Pipeline pipeline;
  // The worker is the slower side, so the operator goes to the trainer, where it takes ten times as long as promised.
  pipeline.run(200, 20e-3, 25e-3, 10 * kMovingS);
  EXPECT_TRUE(pipeline.moves());
  EXPECT_TRUE(pipeline.cut()->shown->is_held);
  EXPECT_EQ(pipeline.cut()->pricing->changes, 2u);
  pipeline.run(200, 20e-3, 25e-3);
  EXPECT_TRUE(pipeline.moves()) << "it is held until the loads shift";
}

TEST(Repricer, APlanIsTakenBackForWhatWorkersAreMeasuredToTakeForIt) {
  Pipeline pipeline({.loss_max = 100});  // however long its steps are
  pipeline.run(200, 1e-3, 60e-3);
  EXPECT_FALSE(pipeline.moves());
  // The trainer becomes the slower side, so the operator moves, and takes a worker ten times as long as calibrated.
  pipeline.run(200, 60e-3, 1e-3, kMovingS, 10 * kMovingS);
  EXPECT_FALSE(pipeline.moves());
  EXPECT_TRUE(pipeline.cut()->shown->is_held);
  EXPECT_EQ(pipeline.cut()->pricing->changes, 3u);
}

TEST(Repricer, PlansChangeAFewTimesAtMost) {
  Pipeline pipeline({.changes_max = 3});
  for (int phase = 0; phase < 12; ++phase) {
    const bool is_trainer_slow = phase % 2 == 0;
    pipeline.run(400, is_trainer_slow ? 60e-3 : 1e-3, is_trainer_slow ? 1e-3 : 60e-3);
  }
  EXPECT_EQ(pipeline.cut()->pricing->changes, 3u);
}

TEST(Repricer, ACutThatIsCalledForFewStepsHasNoSay) {
  const auto meter = std::make_shared<LoadMeter>();
  Repricer repricer(meter);
  const auto rare = std::make_shared<PricedCut>(
      PricedCut{.plans = plans_of(CutMode::kNone, local_prices(1)), .pricing = std::make_shared<GraphPricing>()});
  meter->begin(1, 0);
  for (uint64_t k = 1; k < 60; ++k) meter->note(static_cast<double>(k), static_cast<double>(k), {.batches = k});
  repricer.note_call(rare, 1);
  EXPECT_TRUE(repricer.is_window_due());
  EXPECT_FALSE(repricer.take_window(4));
  EXPECT_FALSE(repricer.change_of(rare));
}

}  // namespace
}  // namespace penstock::graph
