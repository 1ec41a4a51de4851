// SPDX-License-Identifier: Apache-2.0
#include "scheduling/allocation.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace penstock::scheduling {
namespace {

double worth(const std::vector<JobClaim>& claims, const std::vector<uint32_t>& counts) {
  double sum = 0;
  for (size_t job = 0; job < claims.size(); ++job) {
    const std::vector<double> hull = concave_hull(claims[job].progress);
    sum += claims[job].gpus * claims[job].priority * hull[std::min<size_t>(counts[job], hull.size() - 1)];
  }
  return sum;
}

// The best of all counts that the checker lets pass.
double best_worth(const std::vector<JobClaim>& claims, uint32_t worker_count, const AllocationOptions& options) {
  double best = -1;
  std::vector<uint32_t> counts(claims.size(), 0);
  const std::function<void(size_t, uint32_t)> place = [&](size_t job, uint32_t left) {
    if (job == claims.size()) {
      if (!check_allocation(claims, worker_count, options, counts)) best = std::max(best, worth(claims, counts));
      return;
    }
    for (uint32_t count = 0; count <= left; ++count) {
      counts[job] = count;
      place(job + 1, left - count);
    }
  };
  place(0, worker_count);
  return best;
}

struct Case {
  std::vector<JobClaim> claims;
  uint32_t worker_count;
  AllocationOptions options;
};

Case random_case(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t bound) { return static_cast<uint32_t>(random() % bound); };
  Case made{.claims = {}, .worker_count = below(8), .options = {}};
  const uint32_t job_count = 1 + below(4);
  uint32_t left = made.worker_count;
  for (uint32_t job = 0; job < job_count; ++job) {
    std::vector<double> curve{0.0};
    const uint32_t points = below(6);
    for (uint32_t point = 0; point < points; ++point) curve.push_back(curve.back() + below(5));
    if (curve.back() > 0)
      for (double& value : curve) value /= curve.back();
    const uint32_t has = below(left + 1);
    left -= has;
    made.claims.push_back({.job_id = job + 1,
                           .worker_count = has,
                           .progress = curve,
                           .gpus = 1.0 + below(8),
                           .priority = 1.0 + below(2),
                           .owners = {}});
    const std::string user = below(2) == 0 ? "ann" : "ben";
    if (below(3) == 0) made.claims.back().floor_max = below(4);
    made.claims.back().owners = {user, user + (below(2) == 0 ? "'s images" : "'s rows")};
  }
  if (below(2) == 0) made.options.floor_share = below(5) / 4.0;
  if (below(2) == 0) made.options.quotas["ann"] = below(5);
  if (below(4) == 0) made.options.quotas["ben"] = below(5);
  if (below(3) == 0) made.options.quotas["ann's rows"] = below(4);
  if (below(3) == 0) made.options.quotas["ben's images"] = below(4);
  return made;
}

JobClaim linear(uint64_t id, uint32_t has, uint32_t demand, double gpus = 1) {
  JobClaim claim{.job_id = id, .worker_count = has, .gpus = gpus};
  for (uint32_t count = 0; count <= demand; ++count) claim.progress.push_back(static_cast<double>(count) / demand);
  return claim;
}

TEST(Allocation, IsAsGoodAsTheBestOfAllCountsInThousandsOfCases) {
  for (uint64_t seed = 0; seed < 5000; ++seed) {
    const Case made = random_case(seed);
    const auto counts = gpu_progress(made.claims, made.worker_count, made.options);
    ASSERT_EQ(check_allocation(made.claims, made.worker_count, made.options, counts), std::nullopt) << seed;
    ASSERT_NEAR(worth(made.claims, counts), best_worth(made.claims, made.worker_count, made.options), 1e-9) << seed;
  }
}

TEST(Allocation, MovesNothingWhenItIsAskedAgain) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Case made = random_case(seed);
    made.options.move_cost_s = static_cast<double>(seed % 3) * 20;
    const auto counts = gpu_progress(made.claims, made.worker_count, made.options);
    for (size_t job = 0; job < counts.size(); ++job) made.claims[job].worker_count = counts[job];
    ASSERT_EQ(gpu_progress(made.claims, made.worker_count, made.options), counts) << seed;
  }
}

TEST(Allocation, AMoveThatDoesNotPayIsNotMade) {
  std::vector<JobClaim> claims{linear(1, 4, 4, 1.0), linear(2, 0, 4, 1.2)};
  EXPECT_EQ(gpu_progress(claims, 4, {}), (std::vector<uint32_t>{0, 4}));
  EXPECT_EQ(gpu_progress(claims, 4, {.move_cost_s = 30, .horizon_s = 60}), (std::vector<uint32_t>{4, 0}));
  EXPECT_EQ(gpu_progress(claims, 4, {.move_cost_s = 5, .horizon_s = 60}), (std::vector<uint32_t>{0, 4}));
}

TEST(Allocation, AFreeWorkerIsGivenWhateverAMoveCosts) {
  std::vector<JobClaim> claims{linear(1, 1, 4), linear(2, 0, 4)};
  EXPECT_EQ(gpu_progress(claims, 3, {.move_cost_s = 60, .horizon_s = 60})[0] +
                gpu_progress(claims, 3, {.move_cost_s = 60, .horizon_s = 60})[1],
            3u);
}

TEST(Allocation, FloorsHoldUnlessAQuotaForbidsThem) {
  std::vector<JobClaim> claims{linear(1, 8, 8, 100), linear(2, 0, 8, 1)};
  EXPECT_EQ(gpu_progress(claims, 8, {.floor_share = 0.5}), (std::vector<uint32_t>{6, 2}));
  claims[1].owners = {"ben"};
  EXPECT_EQ(gpu_progress(claims, 8, {.floor_share = 0.5, .quotas = {{"ben", 1}}}), (std::vector<uint32_t>{7, 1}));
}

TEST(Allocation, WorkersToSpareAreNoPartOfAFloor) {
  std::vector<JobClaim> claims{linear(1, 0, 2), linear(2, 0, 8, 4)};
  claims[0].progress = {0, 0.95, 1};
  EXPECT_EQ(gpu_progress(claims, 4, {.floor_share = 1}), (std::vector<uint32_t>{2, 2}));
  claims[0].floor_max = 1;
  EXPECT_EQ(gpu_progress(claims, 4, {.floor_share = 1}), (std::vector<uint32_t>{1, 3}));
}

TEST(Allocation, MaxMinIsEvenUpToTheDemand) {
  std::vector<JobClaim> claims{linear(1, 0, 2), linear(2, 0, 9), linear(3, 0, 9)};
  EXPECT_EQ(max_min(claims, 10, {}), (std::vector<uint32_t>{2, 4, 4}));
  claims[2].worker_count = 9;
  EXPECT_EQ(max_min(claims, 9, {}), (std::vector<uint32_t>{2, 3, 4}));
}

TEST(Allocation, PoliciesAreFoundByName) {
  EXPECT_EQ(policy_named("gpu-progress"), &gpu_progress);
  EXPECT_EQ(policy_named("max-min"), &max_min);
  EXPECT_EQ(policy_named("even"), nullptr);
}

TEST(Allocation, NonsenseOfAPolicyIsNamed) {
  std::vector<JobClaim> claims{linear(1, 0, 4), linear(2, 0, 4)};
  claims[0].owners = claims[1].owners = {"ann"};
  EXPECT_EQ(check_allocation(claims, 4, {}, std::vector<uint32_t>{1}), "the policy assigned 1 counts for 2 jobs");
  EXPECT_EQ(check_allocation(claims, 4, {}, std::vector<uint32_t>{3, 2}),
            "the policy assigned 5 workers, but the pool has 4");
  EXPECT_EQ(check_allocation(claims, 4, {.quotas = {{"ann", 2}}}, std::vector<uint32_t>{2, 1}),
            "the policy assigned 3 workers to jobs of 'ann', whose quota is 2");
  EXPECT_EQ(check_allocation(claims, 4, {.floor_share = 1}, std::vector<uint32_t>{4, 0}),
            "the policy assigned job 2 0 workers, fewer than its minimum of 2");
}

TEST(Allocation, UsersShareEvenlyAndThenTheJobsOfEach) {
  std::vector<JobClaim> claims{linear(1, 0, 8)};
  claims[0].user = "ben";
  for (uint64_t id = 2; id <= 8; ++id) claims.push_back(linear(id, 0, 8));
  EXPECT_EQ(max_min(claims, 8, {}), (std::vector<uint32_t>{4, 1, 1, 1, 1, 0, 0, 0}));
  EXPECT_EQ(floor_counts(claims, 8, {.floor_share = 1}), (std::vector<uint32_t>{4, 0, 0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(floor_counts(claims, 28, {.floor_share = 1}), (std::vector<uint32_t>{8, 2, 2, 2, 2, 2, 2, 2}));
  for (const AllocationPolicy policy : {gpu_progress, max_min})
    EXPECT_EQ(check_allocation(claims, 8, {.floor_share = 1}, policy(claims, 8, {.floor_share = 1})), std::nullopt);
}

// Jobs of which nothing was measured, and that asked for one worker each, took the workers of one that needs many.
TEST(Allocation, JobThatIsServedKeepsAWorkerHoweverManyCome) {
  std::vector<JobClaim> claims;
  for (uint64_t id = 1; id <= 20; ++id) claims.push_back(linear(id, 0, 1));
  claims.push_back(linear(21, 2, 16));
  const AllocationOptions options{.floor_share = 1, .move_cost_s = 15, .horizon_s = 60};
  EXPECT_EQ(gpu_progress(claims, 2, options).back(), 0u);
  for (JobClaim& claim : claims) claim.keeps_one = true;
  EXPECT_EQ(gpu_progress(claims, 2, options).back(), 1u);
  EXPECT_EQ(max_min(claims, 2, options).back(), 1u);
}

TEST(Allocation, JobsThatAreServedKeepNoMoreThanTheirUsersShare) {
  std::vector<JobClaim> claims;
  for (uint64_t id = 1; id <= 8; ++id) claims.push_back(linear(id, 1, 1));
  for (JobClaim& claim : claims) claim.keeps_one = true;
  claims.push_back(linear(9, 0, 8));
  claims.back().user = "ben";
  const AllocationOptions options{.floor_share = 1};
  EXPECT_EQ(floor_counts(claims, 8, options), (std::vector<uint32_t>{1, 1, 1, 1, 0, 0, 0, 0, 4}));
  EXPECT_EQ(floor_counts(claims, 1, options), (std::vector<uint32_t>{1, 0, 0, 0, 0, 0, 0, 0, 0}))
      << "with fewer workers than users";
}

}  // namespace
}  // namespace penstock::scheduling
