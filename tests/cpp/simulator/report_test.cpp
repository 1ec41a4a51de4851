// SPDX-License-Identifier: Apache-2.0
#include "simulator/report.h"

#include <gtest/gtest.h>

#include <vector>

namespace penstock::simulator {
namespace {

TEST(Report, CountsWaitingApartFromRunning) {
  // Two jobs on one GPU: the second waits for the first.
  const std::vector<Profile> profiles{{.speeds = {1}}};
  const std::vector<Job> jobs{{.submit_s = 0, .duration_s = 100}, {.submit_s = 20, .duration_s = 60}};
  const Cluster cluster{.server_count = 1, .gpus_per_server = 1, .cpus_per_gpu = 2};
  auto outcome = simulate(jobs, profiles, cluster, {});
  ASSERT_TRUE(outcome);
  const Report report = report_on(jobs, cluster, outcome.value());
  EXPECT_DOUBLE_EQ(report.completion_mean_s, 120);
  EXPECT_DOUBLE_EQ(report.completion_median_s, 100);
  EXPECT_DOUBLE_EQ(report.completion_p99_s, 140);
  EXPECT_DOUBLE_EQ(report.waiting_mean_s, 40);
  EXPECT_DOUBLE_EQ(report.running_mean_s, 80);
  EXPECT_EQ(report.completions_s, (std::vector<double>{100, 140}));
  EXPECT_DOUBLE_EQ(report.makespan_s, 160);
  EXPECT_DOUBLE_EQ(report.gpu_allocated_share, 1);
  EXPECT_DOUBLE_EQ(report.gpu_busy_share, 1);
  EXPECT_DOUBLE_EQ(report.cpu_used_share, 0.5);  // a second CPU is of no use
  EXPECT_DOUBLE_EQ(report.operations_per_job_minute, 0);
}

TEST(Report, CountsOperationsByMinutesOfRunningJobs) {
  const std::vector<Job> jobs{{.submit_s = 0, .duration_s = 120}};
  Outcome outcome{.jobs = {{.end_s = 120, .running_s = 120, .end_count = 1}}, .end_s = 120};
  outcome.move_count = 5;
  outcome.preempt_count = 1;
  outcome.moved_bytes = 7;
  const Report report = report_on(jobs, {}, outcome);
  EXPECT_DOUBLE_EQ(report.operations_per_job_minute, 3);
  EXPECT_DOUBLE_EQ(report.moved_bytes, 7);
}

TEST(Report, ASpeedupHasStudentsInterval) {
  const std::vector<double> other{2, 4, 6}, own{1, 1, 1};
  auto speedup = paired_speedup(other, own);
  ASSERT_TRUE(speedup);
  EXPECT_DOUBLE_EQ(speedup.value().mean, 4);
  EXPECT_DOUBLE_EQ(speedup.value().least, 2);
  EXPECT_DOUBLE_EQ(speedup.value().most, 6);
  // 4.303 * 2 / sqrt(3)
  EXPECT_NEAR(*speedup.value().interval_high, 8.9687, 1e-3);
  EXPECT_NEAR(*speedup.value().interval_low, -0.9687, 1e-3);
}

TEST(Report, OnePairHasNoInterval) {
  const std::vector<double> other{3}, own{2};
  EXPECT_FALSE(paired_speedup(other, own).value().interval_low);
}

TEST(Report, ManyPairsHaveAnIntervalNearTheNormalOne) {
  std::vector<double> other, own(100, 1.0);
  for (int pair = 0; pair < 100; ++pair) other.push_back(pair % 2 == 0 ? 1 : 3);
  // t of 99 is 1.984; the deviation is sqrt(100 / 99).
  EXPECT_NEAR(*paired_speedup(other, own).value().interval_high, 2 + 1.984 * 0.100504, 1e-3);
}

TEST(Report, TimesThatMakeNoPairsAreMalformed) {
  const std::vector<double> two{1, 2}, one{1}, none, zero{0};
  EXPECT_EQ(paired_speedup(two, one).error().code, Errc::kMalformed);
  EXPECT_EQ(paired_speedup(none, none).error().code, Errc::kMalformed);
  EXPECT_EQ(paired_speedup(one, zero).error().code, Errc::kMalformed);
}

TEST(Report, PartsOfAGainSumUpToIt) {
  const GainParts parts =
      gain_parts({.waiting_mean_s = 50, .running_mean_s = 30}, {.waiting_mean_s = 10, .running_mean_s = 20});
  EXPECT_EQ(parts.waiting_s, 40);
  EXPECT_EQ(parts.running_s, 10);
}

}  // namespace
}  // namespace penstock::simulator
