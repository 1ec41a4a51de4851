// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the workers of one job are shared out over its ranks. The ranks train in step, so that the job is as fast as the
// rank that workers keep waiting longest, and each further worker goes to that rank. Pure.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace penstock::cluster {

// A worker moves from one rank of a job to another where the slowest of the two is faster by this factor afterwards:
// measured speeds differ by a few percent from one time to the next.
constexpr double kRankMoveGainMin = 1.15;

struct RankClaim {
  uint32_t worker_count = 0;      // that it has now
  uint32_t worker_count_max = 0;  // that it has use for; a rank with 0 holds the job up in nothing
  // The share of its full speed, from 0 to 1, that it has with so many workers; not decreasing.
  std::function<double(uint32_t)> progress;
};

// The share of its full speed that a job has with 0, 1, ... workers, up to `total_max` or all that its ranks have use
// for, if each is where it is needed most: that of its slowest rank.
std::vector<double> job_progress(std::span<const RankClaim> ranks, uint32_t total_max);

// So many workers of `total` for each rank; at most what it has use for. Ranks keep what they have as far as the total
// allows, unless a move gains kRankMoveGainMin.
std::vector<uint32_t> split_among_ranks(std::span<const RankClaim> ranks, uint32_t total);

}  // namespace penstock::cluster
