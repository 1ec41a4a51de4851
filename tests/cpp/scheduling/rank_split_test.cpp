// SPDX-License-Identifier: Apache-2.0
#include "scheduling/rank_split.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

namespace penstock::scheduling {
namespace {

// A rank that `busy` workers keep busy.
RankClaim rank_with(uint32_t has, double busy, uint32_t most = 64) {
  return {.worker_count = has, .worker_count_max = most, .progress = [busy](uint32_t count) {
            return std::min(1.0, count / busy);
          }};
}

uint32_t sum(const std::vector<uint32_t>& counts) { return std::accumulate(counts.begin(), counts.end(), 0U); }

double slowest(const std::vector<RankClaim>& ranks, const std::vector<uint32_t>& counts) {
  double slowest = 1;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].worker_count_max > 0) slowest = std::min(slowest, ranks[rank].progress(counts[rank]));
  return slowest;
}

// The best speed of the slowest rank, of all ways to give out `total`.
double best_slowest(const std::vector<RankClaim>& ranks, std::vector<uint32_t>& counts, uint32_t total, size_t rank) {
  if (rank == ranks.size()) return slowest(ranks, counts);
  double best = 0;
  for (counts[rank] = 0; counts[rank] <= std::min(total, ranks[rank].worker_count_max); ++counts[rank])
    best = std::max(best, best_slowest(ranks, counts, total - counts[rank], rank + 1));
  return best;
}

TEST(RankSplitTest, GivesMoreToTheRankThatWaitsMost) {
  const std::vector<RankClaim> ranks = {rank_with(0, 1), rank_with(0, 3), rank_with(0, 2)};
  EXPECT_EQ(split_among_ranks(ranks, 6), (std::vector<uint32_t>{1, 3, 2}));
}

TEST(RankSplitTest, GivesEveryRankOneBeforeAnyHasTwo) {
  const std::vector<RankClaim> ranks = {rank_with(0, 1), rank_with(0, 9), rank_with(0, 2)};
  EXPECT_EQ(split_among_ranks(ranks, 3), (std::vector<uint32_t>{1, 1, 1}));
}

TEST(RankSplitTest, LeavesWorkersWhereTheyAreForASmallGain) {
  const std::vector<RankClaim> ranks = {rank_with(3, 8.2), rank_with(4, 8)};
  EXPECT_EQ(split_among_ranks(ranks, 7), (std::vector<uint32_t>{3, 4}));
  const std::vector<RankClaim> level = {rank_with(2, 4), rank_with(4, 4.4)};
  EXPECT_EQ(split_among_ranks(level, 6), (std::vector<uint32_t>{3, 3}));
}

TEST(RankSplitTest, ARankWithoutUseForWorkersHoldsNothingUp) {
  const std::vector<RankClaim> ranks = {rank_with(2, 1, 0), rank_with(0, 4)};
  EXPECT_EQ(split_among_ranks(ranks, 4), (std::vector<uint32_t>{0, 4}));
  EXPECT_EQ(job_progress(ranks, 1000)[4], 1.0);
}

TEST(RankSplitTest, AJobWithOneRankHasTheProgressOfItsRank) {
  const std::vector<double> progress = job_progress(std::vector{rank_with(0, 4, 5)}, 1000);
  EXPECT_EQ(progress, (std::vector<double>{0, 0.25, 0.5, 0.75, 1, 1}));
  EXPECT_EQ(job_progress(std::vector{rank_with(0, 4, 5)}, 2), (std::vector<double>{0, 0.25, 0.5}));
}

TEST(RankSplitTest, NoOtherSplitHasAFasterSlowestRank) {
  std::mt19937_64 random(7);
  const auto below = [&](uint64_t end) { return static_cast<uint32_t>(random() % end); };
  for (int round = 0; round < 300; ++round) {
    std::vector<RankClaim> ranks;
    const uint32_t rank_count = 1 + below(4);
    for (uint32_t rank = 0; rank < rank_count; ++rank)
      ranks.push_back(rank_with(below(5), 0.5 + 0.1 * below(60), below(6)));
    const std::vector<double> progress = job_progress(ranks, 1000);
    const uint32_t use = static_cast<uint32_t>(progress.size()) - 1;
    const uint32_t total = below(use + 3);
    const std::vector<uint32_t> counts = split_among_ranks(ranks, total);
    EXPECT_EQ(sum(counts), std::min(total, use));
    std::vector<uint32_t> tried(ranks.size(), 0);
    const double best = best_slowest(ranks, tried, total, 0);
    EXPECT_DOUBLE_EQ(progress[std::min(total, use)], best);
    EXPECT_GE(slowest(ranks, counts) * kRankMoveGainMin * (1 + 1e-9), best) << "round " << round;
  }
}

}  // namespace
}  // namespace penstock::scheduling
