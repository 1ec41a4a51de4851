// SPDX-License-Identifier: Apache-2.0
#include "scheduling/capacity.h"

#include <gtest/gtest.h>

#include <limits>
#include <random>

namespace penstock::scheduling {
namespace {

using std::chrono::hours;
using std::chrono::seconds;

class CapacityTest : public testing::Test {
 protected:
  uint32_t want(uint32_t demand) {
    load_.demand_count = demand;
    last_ = capacity_.decide(load_, limits_, now_);
    return last_.wanted_count;
  }
  // The engine runs so many, which report.
  void run(uint32_t count) { load_.registered_count = count; }
  void refuse(uint32_t granted) {
    run(granted);
    ++load_.refusal_count;
    load_.refusal = "the partition is full";
  }
  bool says(const char* words) const { return last_.reason.find(words) != std::string::npos; }

  Instant now_{hours(1)};
  PoolLimits limits_{.worker_count_max = 8, .idle = seconds(60), .start_allowance = seconds(30)};
  PoolLoad load_;
  Capacity capacity_;
  CapacityDecision last_;
};

TEST_F(CapacityTest, GrowsAtOnceToWhatJobsCanUse) {
  EXPECT_EQ(want(0), 0u);
  EXPECT_TRUE(says("no job asks"));
  EXPECT_EQ(want(3), 3u);
  EXPECT_EQ(last_.reason, "jobs can use 3 workers");
  EXPECT_EQ(want(64), 8u);
  EXPECT_TRUE(says("8 at most")) << last_.reason;
}

TEST_F(CapacityTest, KeepsTheLeastWithoutAJob) {
  limits_.worker_count_min = 2;
  EXPECT_EQ(want(0), 2u);
  EXPECT_TRUE(says("2 at least")) << last_.reason;
  EXPECT_EQ(want(1), 2u);
}

TEST_F(CapacityTest, ShrinksOnlyAfterTheIdleTime) {
  want(5);
  run(5);
  EXPECT_EQ(want(1), 5u);
  EXPECT_TRUE(says("releases workers after 60 s")) << last_.reason;
  now_ += seconds(59);
  EXPECT_EQ(want(0), 5u);
  now_ += seconds(1);
  EXPECT_EQ(want(0), 1u) << "one was of use within the idle time";
  now_ += seconds(60);
  EXPECT_EQ(want(0), 0u);
}

TEST_F(CapacityTest, PauseBetweenEpochsGivesNothingBack) {
  want(5);
  run(5);
  for (int epoch = 0; epoch < 10; ++epoch) {
    EXPECT_EQ(want(0), 5u);
    now_ += seconds(50);
    EXPECT_EQ(want(0), 5u);
    EXPECT_EQ(want(5), 5u);
    now_ += seconds(50);
  }
}

TEST_F(CapacityTest, ClockThatGoesBackIsHarmless) {
  want(5);
  run(5);
  EXPECT_EQ(want(0), 5u);
  now_ -= hours(1);
  EXPECT_EQ(want(0), 5u);
  now_ += hours(1) + seconds(60);
  EXPECT_EQ(want(0), 0u);
}

TEST_F(CapacityTest, BudgetOfZeroIsNoWorkerAndASentence) {
  limits_.budget_micros = 0;
  limits_.worker_count_min = 2;
  EXPECT_EQ(want(5), 0u);
  EXPECT_TRUE(says("budget of 0.00 is spent")) << last_.reason;
}

TEST_F(CapacityTest, SpentBudgetEndsAllWorkersAtOnce) {
  limits_.price_micros_per_hour = 100'000;
  limits_.budget_micros = 1'000'000;
  EXPECT_EQ(want(5), 5u);
  run(5);
  load_.spent_worker_ms = 10 * 3'600'000 - 1;
  EXPECT_EQ(want(5), 5u);
  load_.spent_worker_ms += 1;
  EXPECT_EQ(want(5), 0u);
  EXPECT_TRUE(says("1.00 is spent")) << last_.reason;
}

TEST_F(CapacityTest, SpentMoneyNeverWrapsAround) {
  constexpr uint64_t most = std::numeric_limits<uint64_t>::max();
  limits_.price_micros_per_hour = most;
  EXPECT_EQ(spent_micros(limits_, most), most);
  limits_.price_micros_per_hour = 1'000'000;
  EXPECT_EQ(spent_micros(limits_, 5'400'000), 1'500'000u);
  EXPECT_LT(spent_micros(limits_, most), most);
  limits_.price_micros_per_hour = 0;
  EXPECT_EQ(spent_micros(limits_, most), 0u);
}

TEST_F(CapacityTest, RefusedWorkersAreAskedForAfterADoublingPause) {
  EXPECT_EQ(want(8), 8u);
  refuse(4);
  for (const int pause_s : {1, 2, 4, 8, 16, 32, 64, 64}) {
    EXPECT_EQ(want(8), 4u);
    EXPECT_TRUE(says("refused more than 4: the partition is full")) << last_.reason;
    now_ += seconds(pause_s) - Duration(1);
    EXPECT_EQ(want(8), 4u);
    now_ += Duration(1);
    EXPECT_EQ(want(8), 8u);
    EXPECT_TRUE(says("retrying")) << last_.reason;
    refuse(4);
  }
}

TEST_F(CapacityTest, WhatIsGrantedAgainEndsThePause) {
  want(8);
  refuse(4);
  EXPECT_EQ(want(8), 4u);
  load_.refusal.clear();
  run(8);
  EXPECT_EQ(want(8), 8u);
  refuse(7);
  want(8);
  now_ += kAskPauseMin;
  EXPECT_EQ(want(8), 8u) << "the pause is a short one again";
}

TEST_F(CapacityTest, WorkerThatDiesDuringAPauseIsReplaced) {
  want(8);
  refuse(4);
  EXPECT_EQ(want(8), 4u);
  run(3);
  EXPECT_EQ(want(8), 4u);
}

TEST_F(CapacityTest, ControllerThatStartsAnewKeepsWhatThereIs) {
  run(5);
  load_.is_demand_known = false;
  EXPECT_EQ(want(0), 5u);
  EXPECT_TRUE(says("just started")) << last_.reason;
  load_.is_demand_known = true;
  EXPECT_EQ(want(5), 5u);
}

// Whatever happens, in whatever order.
TEST_F(CapacityTest, WantedCountIsAlwaysWithinTheLimits) {
  std::mt19937 random(7);
  const auto below = [&](uint32_t count) { return static_cast<uint32_t>(random() % count); };
  for (int round = 0; round < 20'000; ++round) {
    limits_.worker_count_max = below(10);
    limits_.worker_count_min = below(limits_.worker_count_max + 1);
    now_ += seconds(below(90)) - seconds(below(30));
    load_.starting_count = below(4);
    load_.is_demand_known = below(4) != 0;
    if (below(3) == 0) refuse(below(6));
    if (below(3) == 0) load_.refusal.clear();
    run(below(6));
    EXPECT_LE(want(below(20)), limits_.worker_count_max);
    EXPECT_FALSE(last_.reason.empty());
  }
}

}  // namespace
}  // namespace penstock::scheduling
