// SPDX-License-Identifier: Apache-2.0
#include "simulator/simulation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "simulator/demand_rule.h"

namespace penstock::simulator {
namespace {

TEST(TrainerMeter, TellsOfWholeBatchesAlone) {
  TrainerMeter meter;
  meter.advance(2.5, {.batches_per_s = 1, .step_s = 0.25, .worker_s = 4});
  const wire::QueueSignal queue = meter.report(8).queue;
  EXPECT_EQ(queue.step_count, 2U);
  EXPECT_EQ(queue.made_batches, 2U);
  EXPECT_EQ(queue.stepping_ns, 500'000'000U);
  EXPECT_EQ(queue.starved_ns, 1'500'000'000U);
  EXPECT_EQ(queue.made_ns, 8'000'000'000U);
  EXPECT_EQ(queue.ready_batches, 0U);
}

TEST(TrainerMeter, TheTimeBeforeTheFirstBatchIsAPause) {
  TrainerMeter meter;
  meter.advance(10, {.step_s = 1, .worker_s = 1});
  EXPECT_EQ(meter.report(8).queue.starved_ns, 0U);
}

// A pace that changed in the middle of a batch made the totals go back, which began the job's history anew.
TEST(TrainerMeter, TotalsNeverGoBack) {
  TrainerMeter meter;
  meter.advance(10.9, {.batches_per_s = 1, .step_s = 1, .worker_s = 1});
  const wire::QueueSignal before = meter.report(8).queue;
  meter.advance(0.001, {.batches_per_s = 0.01, .step_s = 1, .worker_s = 50});
  const wire::QueueSignal after = meter.report(8).queue;
  EXPECT_GE(after.starved_ns, before.starved_ns);
  EXPECT_GE(after.stepping_ns, before.stepping_ns);
  EXPECT_GE(after.made_ns, before.made_ns);
}

std::vector<Profile> profiles() {
  return {{.model = "hungry", .model_class = "image", .batch = 100, .sample_bytes = 1e5, .speeds = {0.3, 0.6, 1, 2, 3}},
          {.model = "sated", .model_class = "language", .speeds = {1}},
          {.model = "middling", .model_class = "speech", .sample_bytes = 1e4, .speeds = {0.4, 0.7, 1, 1.2}}};
}

std::vector<Job> random_jobs(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Job> jobs;
  double submit_s = 0;
  for (size_t job = 0; job < count; ++job) {
    submit_s += static_cast<double>(random() % 400);
    jobs.push_back(
        {.submit_s = submit_s, .duration_s = 60.0 + static_cast<double>(random() % 5000), .gpus = 1U << random() % 5});
  }
  EXPECT_TRUE(assign_models(jobs, profiles(), {40, 40, 20}, seed));
  return jobs;
}

Outcome run(const std::vector<Job>& jobs, const Settings& settings) {
  auto outcome = simulate(jobs, profiles(), {.server_count = 3}, settings);
  EXPECT_TRUE(outcome);
  return outcome.value();
}

// First come, first served by a strict head of line: each job starts once those before it have, and when the GPUs that
// it needs are given back. Walks over jobs, not over events.
std::vector<double> reference_ends(const std::vector<Job>& jobs, const std::vector<double>& speeds, size_t gpu_count) {
  std::vector<double> free_at(gpu_count, 0.0), ends;
  double head_s = 0;
  for (size_t job = 0; job < jobs.size(); ++job) {
    std::sort(free_at.begin(), free_at.end());
    head_s = std::max({head_s, jobs[job].submit_s, free_at[jobs[job].gpus - 1]});
    ends.push_back(head_s + jobs[job].duration_s / speeds[job]);
    std::fill_n(free_at.begin(), jobs[job].gpus, ends.back());
  }
  return ends;
}

TEST(Simulation, FifoEndsJobsWhenAWalkOverTheJobsSaysSo) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    const std::vector<Job> jobs = random_jobs(300, seed);
    for (const CpuPolicy policy : {CpuPolicy::kProportional, CpuPolicy::kInfinite}) {
      std::vector<double> speeds;
      for (const Job& job : jobs)
        speeds.push_back(policy == CpuPolicy::kInfinite ? profiles()[job.profile].speed_max() : 1.0);
      const std::vector<double> ends = reference_ends(jobs, speeds, 24);
      const Outcome outcome = run(jobs, {.cpus = policy});
      for (size_t job = 0; job < jobs.size(); ++job) ASSERT_NEAR(outcome.jobs[job].end_s, ends[job], 1e-6) << seed;
    }
  }
}

TEST(Simulation, ProportionalCpusRunEachJobForItsDuration) {
  const std::vector<Job> jobs = random_jobs(300, 1);
  const Outcome outcome = run(jobs, {});
  for (size_t job = 0; job < jobs.size(); ++job)
    EXPECT_NEAR(outcome.jobs[job].running_s, jobs[job].duration_s, 1e-9 * outcome.end_s);
}

TEST(Simulation, EveryJobEndsOnceAndItsGpuSecondsAddUpByEveryPolicy) {
  const std::vector<Job> jobs = random_jobs(200, 2);
  for (size_t policy = 0; policy < kCpuPolicyNames.size(); ++policy) {
    for (const bool preempts : {false, true}) {
      const Settings settings{.order = preempts ? GpuOrder::kSrtf : GpuOrder::kFifo,
                              .preempts = preempts,
                              .cpus = static_cast<CpuPolicy>(policy)};
      const Outcome outcome = run(jobs, settings);
      double held_s = 0;
      for (size_t job = 0; job < jobs.size(); ++job) {
        EXPECT_EQ(outcome.jobs[job].end_count, 1u) << kCpuPolicyNames[policy];
        EXPECT_GE(outcome.jobs[job].start_s, jobs[job].submit_s);
        held_s += outcome.jobs[job].running_s * jobs[job].gpus;
      }
      EXPECT_NEAR(held_s, outcome.gpu_held_s, 1e-6 * held_s) << kCpuPolicyNames[policy];
      EXPECT_LE(outcome.gpu_busy_s, outcome.gpu_held_s);
      EXPECT_EQ(run(jobs, settings), outcome) << "the same seed is the same run";
    }
  }
}

TEST(Simulation, NoPolicyRunsAJobFasterThanInfiniteCpusDo) {
  const std::vector<Job> jobs = random_jobs(200, 3);
  for (size_t policy = 0; policy < kCpuPolicyNames.size(); ++policy) {
    const Outcome outcome = run(jobs, {.cpus = static_cast<CpuPolicy>(policy)});
    for (size_t job = 0; job < jobs.size(); ++job)
      EXPECT_GE(outcome.jobs[job].running_s, jobs[job].duration_s / profiles()[jobs[job].profile].speed_max() - 1e-6);
  }
}

TEST(Simulation, WithoutALinkRemoteWorkersAreOfNoUse) {
  // The second job needs no more than one CPU a GPU, and is on the other server.
  const std::vector<Job> jobs{{.duration_s = 10000, .gpus = 8, .profile = 0},
                              {.duration_s = 10000, .gpus = 8, .profile = 1}};
  const Settings settings{.cpus = CpuPolicy::kPenstock, .noise = 0};
  const auto with = simulate(jobs, profiles(), {.server_count = 2, .link_bytes_per_s = 1e12}, settings);
  const auto without = simulate(jobs, profiles(), {.server_count = 2, .link_bytes_per_s = 0}, settings);
  ASSERT_TRUE(with);
  ASSERT_TRUE(without);
  EXPECT_LT(with.value().jobs[0].running_s, 4500);
  EXPECT_GT(with.value().moved_bytes, 0);
  EXPECT_GT(without.value().jobs[0].running_s, 9000);
  EXPECT_EQ(without.value().moved_bytes, 0);
}

TEST(Simulation, AJobThatFitsNoClusterIsRefused) {
  const auto outcome = simulate({{.duration_s = 1, .gpus = 25}}, profiles(), {.server_count = 3}, {});
  ASSERT_FALSE(outcome);
  EXPECT_EQ(outcome.error().message, "job 0 has 25 GPUs, but must have 1 to 24, inclusive");
}

// A job with eight GPUs was left no more than one with a single GPU.
TEST(CpuPolicy, TheFloorIsThatOfEachGpu) {
  const Cluster cluster{.server_count = 3, .gpus_per_server = 3, .cpus_per_gpu = 3};
  const auto small = make_demand_rule(CpuPolicy::kPenstock, {.gpus = 1}, cluster);
  const auto large = make_demand_rule(CpuPolicy::kPenstock, {.gpus = 8}, cluster);
  const std::vector<PooledJob> jobs{{.job_id = 1, .gpus = 1, .count = 27, .rule = small.get()},
                                    {.job_id = 2, .gpus = 8, .rule = large.get()}};
  EXPECT_EQ(pooled_counts(CpuPolicy::kPenstock, jobs, 27, {.floor_share = 1}), (std::vector<uint32_t>{3, 24}));
}

// The formula asked for ever more workers, since those that waited for a link were taken for slow ones.
TEST(CpuPolicy, WorkersThatWaitForALinkAreNotTakenForSlowOnes) {
  const std::vector<Job> jobs{{.duration_s = 9000, .gpus = 1}};
  const Cluster cluster{.server_count = 8, .gpus_per_server = 1, .cpus_per_gpu = 3, .link_bytes_per_s = 1e6};
  auto outcome = simulate(jobs, profiles(), cluster, {.cpus = CpuPolicy::kTfDataService, .noise = 0});
  ASSERT_TRUE(outcome);
  EXPECT_LE(outcome.value().move_count, 8U);  // `hungry` needs 9 at most
}

TEST(CpuPolicy, TuningTakesBackOnlyWhatIsBeyondTheShare) {
  const std::vector<double> demands{20, 2, 10}, shares{12, 6, 6};
  EXPECT_EQ(tuned_counts(demands, shares, 40), demands);
  EXPECT_EQ(tuned_counts(demands, shares, 24), (std::vector<double>{12, 2, 10}));
}

}  // namespace
}  // namespace penstock::simulator
