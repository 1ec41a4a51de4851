// SPDX-License-Identifier: Apache-2.0
#pragma once
// How the workers of one job are divided among its ranks. The ranks train in step, so the job is as fast as the rank
// that waits longest for workers, and each further worker is assigned to that rank. Pure.

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace penstock::scheduling {

// A worker moves from one rank of a job to another if this speeds up the slower of the two by at least this factor:
// measured speeds differ by a few percent from one measurement to the next.
constexpr double kRankMoveGainMin = 1.15;

struct RankClaim {
  uint32_t worker_count = 0;      // current number of workers
  uint32_t worker_count_max = 0;  // that it can use; a rank with 0 does not slow the job down
  // Its speed with this many workers as a share of its full speed, from 0 to 1; not decreasing.
  std::function<double(uint32_t)> progress;
};

// A job's speed with 0, 1, ... workers as a share of its full speed, up to `total_max` or to all workers that its ranks
// can use, if each worker is used where it is needed most: the share of its slowest rank.
std::vector<double> job_progress(std::span<const RankClaim> ranks, uint32_t total_max);

// Divides `total` workers among the ranks; each gets at most the number that it can use. Ranks keep their workers as
// far as the total allows, unless a move gains kRankMoveGainMin.
std::vector<uint32_t> split_among_ranks(std::span<const RankClaim> ranks, uint32_t total);

}  // namespace penstock::scheduling
