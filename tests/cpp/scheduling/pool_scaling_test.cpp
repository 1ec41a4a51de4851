// SPDX-License-Identifier: Apache-2.0
#include "scheduling/pool_scaling.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

namespace penstock::scheduling {
namespace {

using State = wire::EngineWorker::State;
using std::chrono::milliseconds;
using std::chrono::seconds;

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
