// SPDX-License-Identifier: Apache-2.0
#include "scheduling/pool_scaling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

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
  now_ += kRetryPauseMin;
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

using State = wire::EngineWorker::State;
using std::chrono::milliseconds;

// An engine that does as it is told, and workers that report half a second later.
class PoolScalingTest : public testing::Test {
 protected:
  void trainer(uint32_t count_max) {
    roster_.trainer_reported({.trainer_id = 100, .job = "job", .worker_count_max = count_max}, now_);
  }
  void worker(uint64_t id, const std::string& name, uint64_t serves = 0) {
    roster_.worker_reported(
        {.worker_id = id, .incarnation = 1, .endpoint = "tcp://a:1", .trainer_id = serves, .name = name}, now_);
  }
  const wire::ScaleOrders& report() {
    report_.workers.clear();
    for (const auto& [name, state] : engine_) report_.workers.push_back({name, state});
    auto orders = scaling_.adapter_reported(report_, roster_, now_);
    EXPECT_TRUE(orders) << orders.error().message;
    if (orders) last_ = std::move(orders).value();
    return last_;
  }
  void pass(Duration time) {
    now_ += time;
    roster_.tick(now_);
  }

  Instant now_{};
  Roster roster_{5, now_};
  PoolScaling scaling_;
  wire::ScaleReport report_{
      .adapter_id = 1, .engine = "local", .worker_count_max = 8, .idle_ms = 1000, .start_allowance_ms = 20'000};
  std::map<std::string, State> engine_;
  wire::ScaleOrders last_;
};

TEST_F(PoolScalingTest, WantsWhatJobsCanUseBesideWorkersStartedByHand) {
  pass(kSettling);
  trainer(5);  // of which nothing is measured: kFirstDemand
  worker(1, "");
  worker(2, "of another pool's engine");
  EXPECT_EQ(report().wanted_count, kFirstDemand - 2);
  EXPECT_TRUE(last_.stops.empty());
}

TEST_F(PoolScalingTest, StopsWorkersThatDoNotRunThenIdleOnesThenTheLastGiven) {
  pass(kSettling);
  trainer(5);
  engine_ = {{"a", State::kRunning}, {"b", State::kRunning}, {"c", State::kRunning}, {"d", State::kStarting}};
  worker(1, "a", 100);
  worker(2, "b", 100);
  trainer(2);
  worker(3, "c");
  report();
  EXPECT_TRUE(last_.stops.empty()) << "the idle time is not over";
  pass(seconds(1));
  trainer(2);
  worker(1, "a", 100);
  worker(2, "b", 100);
  worker(3, "c");
  EXPECT_EQ(report().wanted_count, 2u);
  EXPECT_EQ(last_.stops, (std::vector<std::string>{"c", "d"}));
  EXPECT_TRUE(roster_.workers(now_).at(2).is_leaving);
  EXPECT_FALSE(roster_.workers(now_).at(0).is_leaving);
}

TEST_F(PoolScalingTest, StopIsRepeatedUntilTheEngineNoLongerTellsOfTheWorker) {
  pass(kSettling);
  engine_ = {{"a", State::kRunning}};
  trainer(0);
  report();
  pass(seconds(1));
  EXPECT_EQ(report().stops, std::vector<std::string>{"a"});
  EXPECT_EQ(report().stops, std::vector<std::string>{"a"});
  engine_["a"] = State::kStopping;
  EXPECT_EQ(report().stops, std::vector<std::string>{"a"});
  engine_.clear();
  EXPECT_TRUE(report().stops.empty());
}

TEST_F(PoolScalingTest, StoppingWorkersAreNotCountedAsThere) {
  pass(kSettling);
  trainer(2);
  engine_ = {{"a", State::kStopping}, {"b", State::kRunning}};
  EXPECT_EQ(report().wanted_count, 2u);
  EXPECT_TRUE(last_.stops.empty());
  EXPECT_EQ(scaling_.standing(now_)->stopping_count, 1u);
  EXPECT_EQ(scaling_.standing(now_)->starting_count, 1u);
}

// An engine said that a worker ran that was long dead, and the pool waited for it for ever.
TEST_F(PoolScalingTest, WorkerThatRunsAndIsNeverHeardOfIsReplaced) {
  pass(kSettling);
  engine_ = {{"a", State::kRunning}, {"b", State::kStarting}};
  trainer(2);
  EXPECT_TRUE(report().stops.empty());
  pass(seconds(20));
  trainer(2);
  EXPECT_EQ(report().stops, std::vector<std::string>{"a"});
  EXPECT_EQ(last_.wanted_count, 2u) << "a start that waits in a queue keeps its place";
}

TEST_F(PoolScalingTest, WorkerThatItsEngineHasForgottenIsDrained) {
  pass(kSettling);
  trainer(5);
  const auto is_leaving = [&] { return roster_.workers(now_).at(0).is_leaving; };
  const auto turns = [&](Duration time) {
    for (const Instant end = now_ + time; now_ < end;) {
      pass(milliseconds(500));
      trainer(5);
      worker(1, "a");
      report();
    }
  };
  turns(kOrphanAllowance - seconds(1));
  engine_ = {{"a", State::kRunning}};
  turns(seconds(1));
  engine_.clear();
  report_.trouble = "the engine does not answer";
  turns(kOrphanAllowance + seconds(2));
  EXPECT_FALSE(is_leaving()) << "an engine that cannot be asked has forgotten nobody";
  report_.trouble.clear();
  turns(kOrphanAllowance - seconds(1));
  EXPECT_FALSE(is_leaving());
  turns(seconds(2));
  EXPECT_TRUE(is_leaving());
}

TEST_F(PoolScalingTest, ControllerThatStartsAnewStopsNobodyBeforeItHasSettled) {
  engine_ = {{"a", State::kRunning}, {"b", State::kRunning}};
  report_.idle_ms = 0;
  EXPECT_EQ(report().wanted_count, 2u);
  EXPECT_TRUE(last_.stops.empty());
  pass(kSettling);
  trainer(2);
  EXPECT_TRUE(report().stops.empty());
}

TEST_F(PoolScalingTest, HundredJobsThatComeAndGoWithinAMinuteMakeAndEndNoWorkersOfTheirOwn) {
  pass(kSettling);
  report_.idle_ms = 10'000;
  uint32_t spawned_count = 0, most = 0;
  for (uint64_t turn = 0; turn < 120; ++turn) {  // a job comes at every turn of half a second and stays for four
    pass(milliseconds(500));
    for (uint64_t job = turn; job > 0 && job + 4 > turn; --job)
      if (job <= 100) roster_.trainer_reported({.trainer_id = 100 + job, .job = "job", .worker_count_max = 64}, now_);
    if (turn >= 4) roster_.trainer_left(100 + turn - 4, now_);
    uint64_t id = 0;
    for (const auto& [name, state] : engine_) worker(++id, name);
    report();
    EXPECT_TRUE(turn >= 100 || last_.stops.empty()) << turn;
    while (engine_.size() < last_.wanted_count) engine_["w" + std::to_string(spawned_count++)] = State::kRunning;
    most = std::max(most, last_.wanted_count);
  }
  EXPECT_LE(most, report_.worker_count_max);
  EXPECT_EQ(spawned_count, most) << "workers stay while one job follows the other";
}

TEST_F(PoolScalingTest, SecondAdapterIsRefusedWhileTheFirstReports) {
  report();
  report_.adapter_id = 2;
  const auto refused = scaling_.adapter_reported(report_, roster_, now_);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("penstock down"), std::string::npos);
  pass(kAdapterLease);
  report();
}

TEST_F(PoolScalingTest, EndOfThePoolStopsEverything) {
  EXPECT_FALSE(scaling_.end(now_));
  engine_ = {{"a", State::kRunning}, {"b", State::kStarting}};
  report_.worker_count_min = 2;
  trainer(8);
  report();
  EXPECT_TRUE(scaling_.end(now_));
  EXPECT_TRUE(report().is_to_end);
  EXPECT_EQ(last_.wanted_count, 0u);
  EXPECT_EQ(last_.stops, (std::vector<std::string>{"a", "b"}));
}

}  // namespace
}  // namespace penstock::scheduling
