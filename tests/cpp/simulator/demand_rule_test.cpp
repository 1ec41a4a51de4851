// SPDX-License-Identifier: Apache-2.0
#include "simulator/demand_rule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "simulator/simulation.h"

namespace penstock::simulator {
namespace {

using std::chrono::seconds;

constexpr Cluster kCluster{.server_count = 2, .gpus_per_server = 4, .cpus_per_gpu = 5};  // 40 CPUs

// A job on one GPU, whose batches take a second of the trainer and `worker_s` of a worker. It is given what it asks for
// up to `count_max`, and all of them work at once.
class Trained {
 public:
  Trained(CpuPolicy policy, double worker_s, uint32_t count_max = 100)
      : rule_(make_demand_rule(policy, {.gpus = 1}, kCluster)), worker_s_(worker_s), count_max_(count_max) {
    report();
  }

  void run(seconds time) {
    for (int half = 0; half < 2 * time.count(); ++half) {
      const uint32_t count = std::min(rule_->demand(), count_max_);
      meter_.advance(0.5, {.batches_per_s = std::min(1.0, count / worker_s_), .step_s = 1, .worker_s = worker_s_});
      now_ += std::chrono::milliseconds(500);
      report();
    }
  }
  void take_times(double factor) { worker_s_ *= factor; }
  const DemandRule& rule() const { return *rule_; }

 private:
  void report() { rule_->note(meter_.report(40), std::min(rule_->demand(), count_max_), now_); }

  std::unique_ptr<DemandRule> rule_;
  TrainerMeter meter_;
  double worker_s_;
  uint32_t count_max_;
  Instant now_{};
};

TEST(DemandRule, PenstockAsksForWhatIsNeededAndSpare) {
  Trained job(CpuPolicy::kPenstock, 8, 4);
  EXPECT_EQ(job.rule().demand(), 40U);  // nothing is known: whoever is there
  job.run(seconds(60));
  EXPECT_EQ(job.rule().demand(), 10U);  // 1.25 times 8
  EXPECT_LT(job.rule().progress(4), 0.55);
  EXPECT_GT(job.rule().progress(8), 0.95);
  EXPECT_FALSE(job.rule().wants_report_in());
}

TEST(DemandRule, TfDataServiceAsksForTheRatioOfTheTimes) {
  Trained job(CpuPolicy::kTfDataService, 7.5);
  EXPECT_EQ(job.rule().demand(), 5U);  // its share
  job.run(seconds(60));
  EXPECT_EQ(job.rule().demand(), 8U);
}

TEST(DemandRule, TfDataServiceAsksForAtMostFourTimesAsMany) {
  Trained job(CpuPolicy::kTfDataService, 30, 2);
  job.run(seconds(60));
  EXPECT_EQ(job.rule().demand(), 8U);
}

TEST(DemandRule, CachewGoesUpOneByOneUntilBatchesComeNoFaster) {
  Trained job(CpuPolicy::kCachew, 3);
  EXPECT_EQ(job.rule().demand(), 1U);
  job.run(seconds(12));
  EXPECT_EQ(job.rule().demand(), 2U);
  job.run(seconds(120));
  EXPECT_EQ(job.rule().demand(), 3U);
}

TEST(DemandRule, CachewLooksAgainWhenBatchesTakeLongerByHalf) {
  Trained job(CpuPolicy::kCachew, 3);
  job.run(seconds(120));
  job.take_times(1.4);
  job.run(seconds(600));
  EXPECT_EQ(job.rule().demand(), 3U);
  job.take_times(1.4);
  job.run(seconds(900));
  EXPECT_EQ(job.rule().demand(), 6U);  // 5.88 are needed
}

TEST(DemandRule, CachewWaitsForWorkersThatWereNotGranted) {
  Trained job(CpuPolicy::kCachew, 9, 2);
  job.run(seconds(300));
  EXPECT_EQ(job.rule().demand(), 3U);
}

TEST(DemandRule, RayDataDoublesWhileHalfOfTheWorkersAreAtWork) {
  Trained job(CpuPolicy::kRayData, 9);
  job.run(seconds(12));
  EXPECT_EQ(job.rule().demand(), 10U);
  job.run(seconds(48));
  EXPECT_EQ(job.rule().demand(), 20U);  // of which 9 are at work
}

TEST(DemandRule, RayDataGivesBackWhatWasIdleForLong) {
  Trained job(CpuPolicy::kRayData, 9);
  job.run(seconds(400));
  EXPECT_EQ(job.rule().demand(), 20U);
  uint32_t least = 20;
  for (int turn = 0; turn < 200; ++turn) {
    job.run(seconds(1));
    least = std::min(least, job.rule().demand());
  }
  EXPECT_EQ(least, 9U);
}

}  // namespace
}  // namespace penstock::simulator
