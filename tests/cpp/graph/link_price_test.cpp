// SPDX-License-Identifier: Apache-2.0
// Plans for workers behind a link: the bytes that cross decide where they take longer than the work.

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "graph/effects.h"
#include "graph/ir_text.h"
#include "graph/load_meter.h"
#include "graph/repricer.h"

namespace penstock::graph {
namespace {

constexpr double kRate = 1e6;  // bytes a second
constexpr int64_t kLeafBytes = 1'000'000;
constexpr double kOperatorS = 0.05;

// x is read by an operator that may move, whose result `made_bytes` is read by one that stays.
PricedPlans plans_of(int64_t made_bytes, const Prices& prices, CutMode mode = CutMode::kAuto,
                     double copy_bytes_per_s = 0) {
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
  std::vector<Verdict> verdicts = analyse_effects(graph, {});
  Calibration calibration;
  calibration.node_s = {kOperatorS, 0};
  calibration.copy_bytes_per_s = copy_bytes_per_s;
  for (uint32_t value = 0; value < graph.value_names.size(); ++value) calibration.values.push_back({32, value});
  calibration.values[0].bytes = kLeafBytes;  // x0
  calibration.values[2].bytes = made_bytes;  // a
  return PricedPlans::make(std::move(graph), std::move(verdicts), std::move(calibration), prices, mode).value();
}

Prices prices_of(double rate, bool sends_whole) {
  return link_prices(1, {.bytes_per_s = rate, .sends_whole = sends_whole});
}

bool moves(const PricedPlans& plans) { return !plans.chosen().moved.empty(); }

TEST(LinkPrice, AnOperatorThatMakesMoreBytesStays) {
  EXPECT_FALSE(moves(plans_of(4 * kLeafBytes, prices_of(kRate, /*sends_whole=*/false))));
  EXPECT_TRUE(moves(plans_of(4 * kLeafBytes, prices_of(1e12, false))));  // the link is fast enough
  EXPECT_TRUE(moves(plans_of(4 * kLeafBytes, local_prices(1))));
}

TEST(LinkPrice, ACopyToADeviceIsALinkToo) {
  const auto with_copies_at = [](double rate, const Prices& prices) {
    return plans_of(4 * kLeafBytes, prices, CutMode::kAuto, rate);
  };
  EXPECT_FALSE(moves(with_copies_at(kRate, local_prices(1))));
  EXPECT_TRUE(moves(with_copies_at(1e12, local_prices(1))));
  // The slower of the two counts, whichever that is.
  EXPECT_FALSE(moves(with_copies_at(1e12, prices_of(kRate, /*sends_whole=*/false))));
  EXPECT_FALSE(moves(with_copies_at(kRate, prices_of(1e12, false))));
}

TEST(LinkPrice, AnOperatorThatMakesFewerBytesMoves) {
  EXPECT_TRUE(moves(plans_of(kLeafBytes / 10, prices_of(kRate, false))));
}

TEST(LinkPrice, WhereTheRawBatchCrossesAnywayFewerBytesAreMoreBytes) {
  // 10 ms of work of the trainer's are saved by half a second on the link.
  EXPECT_FALSE(moves(plans_of(kLeafBytes / 2, prices_of(kRate, /*sends_whole=*/true))));
  EXPECT_TRUE(moves(plans_of(100, prices_of(kRate, true))));
}

TEST(LinkPrice, PlanSaysHowManyBytesAreSent) {
  const PricedPlans in_part = plans_of(kLeafBytes / 10, prices_of(kRate, false), CutMode::kMaximal);
  EXPECT_EQ(in_part.none().sent_bytes, kLeafBytes);
  EXPECT_EQ(in_part.maximal().sent_bytes, kLeafBytes / 10);
  const PricedPlans whole = plans_of(kLeafBytes / 10, prices_of(kRate, true), CutMode::kMaximal);
  EXPECT_EQ(whole.none().sent_bytes, kLeafBytes);
  EXPECT_EQ(whole.maximal().sent_bytes, kLeafBytes + kLeafBytes / 10);
}

TEST(LinkPrice, StepTakesAsLongAsTheLinkWhereThatIsTheSlowest) {
  Prices prices = prices_of(kRate, false);
  prices.loads = Loads{.trainer_s = 0.1, .worker_s = 0.1, .link_s = 0.25, .cpus = 0};
  const PricedPlans plans = plans_of(4 * kLeafBytes, prices);
  EXPECT_FALSE(moves(plans));
  EXPECT_DOUBLE_EQ(plans.step(plans.none(), prices).step_s, 1.25);
  EXPECT_DOUBLE_EQ(plans.step(plans.maximal(), prices).link_s, 4.25);
  prices.loads->link_s = -1;
  EXPECT_FALSE(check_prices(prices));
}

// A loader whose batches cross a link: as many bytes as its plan says, and those of a label.
TEST(LinkPrice, PlanFollowsTheLinkWhileTheLoaderRuns) {
  constexpr double kLabelBytes = 1000;
  const auto meter = std::make_shared<LoadMeter>();
  Repricer repricer(meter);
  meter->begin(1, 0);
  const auto cut_of = [](CutMode mode, const Prices& prices, const Repricer::Cut& like) {
    auto plans = std::make_shared<PricedPlans>(plans_of(4 * kLeafBytes, prices, mode));
    const bool has_suffix = !plans->chosen().moved.empty();
    return std::make_shared<PricedCut>(PricedCut{.plans = std::move(plans),
                                                 .pricing = like ? like->pricing : std::make_shared<GraphPricing>(),
                                                 .has_suffix = has_suffix});
  };
  double now_s = 0;
  DeliveredWork work{.workers = 1};
  Repricer::Cut cut = cut_of(CutMode::kAuto, prices_of(1e12, false), nullptr);
  ASSERT_TRUE(cut->has_suffix);  // the link was thought to be fast
  const auto run = [&](int steps, double rate) {
    for (int step = 0; step < steps; ++step) {
      const double bytes = kLabelBytes + static_cast<double>(cut->plans->chosen().sent_bytes);
      const double trainer_s = 0.1 + (cut->has_suffix ? 0 : kOperatorS);
      const double worker_s = 0.1 + (cut->has_suffix ? kOperatorS : 0);
      const double step_s = std::max({trainer_s, worker_s, bytes / rate});
      work.batches += 1;
      work.with_boundary += cut->has_suffix ? 1 : 0;
      work.fetch_s += worker_s;
      work.prefix_s += cut->has_suffix ? kOperatorS : 0;
      work.bytes += static_cast<uint64_t>(bytes);
      work.link = {.bytes_per_s = rate, .sends_whole = false};
      meter->note(now_s - (step_s - trainer_s), now_s, work);
      now_s += step_s;
      if (cut->has_suffix && cut->pricing->wants_timed_calls()) {
        if (const auto timed = cut->pricing->next_timed_call())
          cut->pricing->note(*timed, 1e-3 + (*timed == TimedCall::kWhole ? kOperatorS : 0));
      }
      repricer.note_call(cut, 1);
      if (repricer.is_window_due()) repricer.take_window(4);
      if (const auto change = repricer.change_of(cut); change && change->prices) {
        const Repricer::Cut before = cut;
        cut = cut_of(CutMode::kAuto, *change->prices, cut);
        repricer.changed(before, cut);
      }
    }
  };
  run(400, kRate * 20);
  EXPECT_FALSE(cut->has_suffix);
  EXPECT_GT(cut->shown->step.link_s, 0);
}

}  // namespace
}  // namespace penstock::graph
