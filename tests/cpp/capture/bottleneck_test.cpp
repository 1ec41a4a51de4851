// SPDX-License-Identifier: Apache-2.0
// The choice by the slowest stage against every choice that there is, on small random graphs.

#include "graph/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "../graph/random_problem.h"
#include "capture/capture.h"
#include "graph/ir_text.h"

namespace penstock::capture {
namespace {

struct Point {
  double trainer_s;
  double feeding_s;
};

Point point(const graph::CutModel& model, const graph::StageSeconds& seconds) {
  return {seconds.trainer_s, seconds.worker_s / model.prices().worker_count + seconds.link_s};
}

std::vector<graph::Choice> valid_choices(const graph::CutModel& model) {
  std::vector<graph::Choice> found;
  for (uint32_t bits = 0; bits < 1u << model.units().size(); ++bits) {
    graph::Choice choice(model.units().size());
    for (size_t unit = 0; unit < choice.size(); ++unit) choice[unit] = (bits >> unit & 1) != 0;
    if (model.is_valid(choice)) found.push_back(std::move(choice));
  }
  return found;
}

// The corners of the lower left of a set of points, by Andrew's chain.
std::vector<Point> lower_left(std::vector<Point> points) {
  constexpr double kSame = 1e-12;
  std::sort(points.begin(), points.end(), [](const Point& a, const Point& b) {
    return a.trainer_s != b.trainer_s ? a.trainer_s < b.trainer_s : a.feeding_s < b.feeding_s;
  });
  std::vector<Point> chain;
  for (const Point& p : points) {
    if (!chain.empty() && p.feeding_s > chain.back().feeding_s - kSame) continue;  // another is as good in both
    while (chain.size() > 1) {
      const Point& a = chain[chain.size() - 2];
      const Point& b = chain.back();
      const double turn = (b.trainer_s - a.trainer_s) * (p.feeding_s - a.feeding_s) -
                          (b.feeding_s - a.feeding_s) * (p.trainer_s - a.trainer_s);
      if (turn > 1e-20) break;
      chain.pop_back();
    }
    chain.push_back(p);
  }
  return chain;
}

TEST(Bottleneck, CornersAreTheLowerHullOfAllChoices) {
  std::mt19937 random(graph::seed());
  RecordProperty("seed", static_cast<int>(graph::seed()));
  size_t corner_count = 0;
  for (int round = 0; round < 1'000; ++round) {
    const graph::Problem problem = graph::random_problem(random);
    const graph::CutModel model(problem.graph, problem.verdicts, problem.calibration, problem.prices);
    std::vector<Point> points;
    for (const graph::Choice& choice : valid_choices(model)) points.push_back(point(model, model.cut(choice).seconds));
    const std::vector<Point> expected = lower_left(points);
    const std::vector<graph::Corner> found = graph::corners(model);
    corner_count += found.size();
    const std::string context = "seed " + std::to_string(graph::seed()) + ", round " + std::to_string(round) + "\n" +
                                graph::print_graph(problem.graph);
    ASSERT_EQ(found.size(), expected.size()) << context;
    for (size_t i = 0; i < found.size(); ++i) {
      const Point seen = point(model, found[i].seconds);
      ASSERT_NEAR(seen.trainer_s, expected[i].trainer_s, 1e-11) << context;
      ASSERT_NEAR(seen.feeding_s, expected[i].feeding_s, 1e-11) << context;
    }
  }
  EXPECT_GT(corner_count, 1'300u) << "the random problems are too dull to test anything";
}

TEST(Bottleneck, FastestIsNeverSlowerThanAnyCornerAndMostlyTheFastestOfAll) {
  std::mt19937 random(graph::seed());
  int best_count = 0;
  constexpr int kRounds = 1'000;
  for (int round = 0; round < kRounds; ++round) {
    const graph::Problem problem = graph::random_problem(random);
    const graph::CutModel model(problem.graph, problem.verdicts, problem.calibration, problem.prices);
    const graph::Loads loads{.trainer_s = static_cast<double>(random() % 40) * 1e-6,
                             .worker_s = static_cast<double>(random() % 40) * 1e-6,
                             .cpus = static_cast<double>(random() % 3)};
    const auto step = [&](const graph::Choice& choice) {
      return std::round(step_seconds(problem.prices, loads, model.cut(choice).seconds) * 1e12);
    };
    const graph::Choice chosen = graph::fastest(model, loads);
    ASSERT_TRUE(model.is_valid(chosen));
    EXPECT_LE(step(chosen), step(model.nothing()));
    EXPECT_LE(step(chosen), step(model.shrink_to_valid(model.everything())));
    for (const graph::Corner& corner : graph::corners(model)) EXPECT_LE(step(chosen), step(corner.choice));
    double best = std::numeric_limits<double>::infinity();
    for (const graph::Choice& choice : valid_choices(model)) best = std::min(best, step(choice));
    ASSERT_GE(step(chosen), best);
    best_count += step(chosen) == best ? 1 : 0;
  }
  EXPECT_GT(best_count, kRounds * 97 / 100);
}

class Chain : public testing::Test {
 protected:
  // Ten operators of 1 ms each, then one that reads a parameter.
  void SetUp() override {
    std::string text = "penstock-ir 1\ninput %x leaf 0 float32 [s0, 4]\ninput %w state \"w\" float32 [4]\n";
    std::string last = "%x";
    for (int i = 0; i < 10; ++i) {
      const std::string next = "%v" + std::to_string(i);
      text += next + " = aten::neg(" + last + ") group " + std::to_string(i) + " \"call\"\n";
      last = next;
    }
    text += "%y = aten::mul.Tensor(" + last + ", %w)\noutput %y\n";
    auto parsed = graph::parse_graph(text);
    ASSERT_TRUE(parsed) << parsed.error().message;
    graph_ = std::move(parsed).value();
    annotate(graph_);
    verdicts_ = analyse_effects(graph_, {});
    calibration_.node_s.assign(graph_.nodes.size(), 1e-3);
    for (graph::ValueId value = 0; value < graph_.value_names.size(); ++value)
      calibration_.values.push_back({1000, value});
    prices_.trainer_node_s = 0;
    prices_.link_bytes_per_s = std::numeric_limits<double>::infinity();
    prices_.raw_stays = true;
  }

  graph::Plan plan(const graph::Loads& loads) {
    prices_.loads = loads;
    auto made = graph::make_plan(graph_, verdicts_, calibration_, prices_, graph::CutMode::kAuto);
    EXPECT_TRUE(made) << made.error().message;
    return made.value();
  }

  graph::Graph graph_;
  std::vector<graph::Verdict> verdicts_;
  graph::Calibration calibration_;
  graph::Prices prices_;
};

TEST_F(Chain, WorkIsSharedUntilBothSidesTakeAsLong) {
  const graph::Plan even = plan({.trainer_s = 0, .worker_s = 0});
  EXPECT_EQ(even.moved.size(), 5u);
  EXPECT_NEAR(*even.step_s, 5e-3, 1e-9);
  const graph::Plan uneven = plan({.trainer_s = 1e-3, .worker_s = 7e-3});
  EXPECT_EQ(uneven.moved.size(), 2u);
  EXPECT_NEAR(*uneven.step_s, 9e-3, 1e-9);
}

TEST_F(Chain, NothingMovesToWorkersThatAreTheSlowerSide) { EXPECT_TRUE(plan({.worker_s = 0.02}).moved.empty()); }

TEST_F(Chain, AllMovesWhereTheTrainerIsTheSlowerSideAnyway) { EXPECT_EQ(plan({.trainer_s = 0.02}).moved.size(), 10u); }

TEST_F(Chain, MoreWorkersTakeMore) {
  prices_.worker_count = 4;
  EXPECT_EQ(plan({}).moved.size(), 8u);  // 2 ms in the trainer, 8 / 4 in a worker's share
}

TEST_F(Chain, NothingMovesBetweenProcessesThatShareOneCpu) {
  EXPECT_TRUE(plan({.cpus = 1}).moved.empty());  // each would still take 10 ms of it
  EXPECT_EQ(plan({.cpus = 2}).moved.size(), 5u);
}

TEST_F(Chain, WritingWhatInflatesKeepsItInTheTrainer) {
  for (graph::ValueId value = 1; value < calibration_.values.size(); ++value)
    calibration_.values[value].bytes = 40'000'000;
  prices_.write_bytes_per_s = 4e9;
  EXPECT_TRUE(plan({.trainer_s = 1e-3, .worker_s = 2e-3}).moved.empty());  // 10 ms to write them
  const graph::Plan idle = plan({.trainer_s = 0.02, .worker_s = 0});
  EXPECT_EQ(idle.moved.size(), 10u);  // 20 ms where the trainer needs as much for the rest
}

TEST_F(Chain, ReasonToKeepSaysHowLongAStepWouldTake) {
  const graph::Plan made = plan({.worker_s = 0.02});
  EXPECT_EQ(made.kept.front().reason,
            "it could move, but is cheaper in the trainer: with it moved a step would take 21 ms instead of 20 ms; "
            "1000 bytes would be sent instead of 1000");
}

TEST_F(Chain, PlanIsPricedAnewByOtherPrices) {
  const graph::Plan made = plan({.trainer_s = 1e-3, .worker_s = 7e-3});
  prices_.trainer_scale = 3;
  prices_.worker_scale = 0.5;
  const auto seconds = graph::plan_seconds(graph_, verdicts_, calibration_, prices_, made);
  ASSERT_TRUE(seconds) << seconds.error().message;
  EXPECT_NEAR(seconds.value().trainer_s, 24e-3, 1e-9);
  EXPECT_NEAR(seconds.value().worker_s, 1e-3, 1e-9);
  graph::Plan other = made;
  other.moved.front().nodes.front() = 99;
  EXPECT_EQ(graph::plan_seconds(graph_, verdicts_, calibration_, prices_, other).error().code, Errc::kMismatch);
}

TEST_F(Chain, LoadsThatMakeNoSenseAreRefused) {
  prices_.loads = graph::Loads{.trainer_s = -1};
  EXPECT_FALSE(graph::make_plan(graph_, verdicts_, calibration_, prices_, graph::CutMode::kAuto));
  prices_.loads = graph::Loads{.worker_s = std::numeric_limits<double>::infinity()};
  EXPECT_FALSE(graph::make_plan(graph_, verdicts_, calibration_, prices_, graph::CutMode::kAuto));
}

}  // namespace
}  // namespace penstock::capture
