// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which worker of a pool is assigned to which trainer, and before that how many workers of a job each of its ranks
// gets. Pure.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace penstock::scheduling {

struct Demand {
  uint64_t trainer_id = 0;
  uint32_t worker_count_max = 0;  // that it can use
};

// A worker that is not leaving.
struct AssignedWorker {
  enum class State : uint8_t {
    kFree,    // can be assigned to a trainer now
    kHeld,    // works for `trainer_id`
    kMoving,  // was withdrawn from a trainer that it has not left yet
    kStray,   // works for a trainer that it was not assigned to; may be assigned to a trainer that finds no other
  };
  State state = State::kFree;
  uint64_t trainer_id = 0;  // of kHeld, one of the demands
  // The most recently assigned worker is taken first: it has the least of the job's data in its caches.
  uint64_t given_order = 0;
  std::span<const uint64_t> declined{};  // trainers that it has declined
};

struct Move {
  size_t hand = 0;
  uint64_t trainer_id = 0;  // that gets it; 0: the worker is withdrawn from its current trainer

  friend bool operator==(const Move&, const Move&) = default;
};

// Assigns workers to trainers: all trainers get the same number, up to the number that each wants, as far as there are
// workers that have not declined them. A scheduler that knows more about the jobs can replace this behind the same
// function.
//
// The result is max-min fair: no trainer could have one more without another one having less than that. To reach it
// from any state, the poorest trainer repeatedly receives a worker that is free or belongs to a trainer that has at
// least two more, if necessary through other trainers that receive a replacement (cost-reducing paths: Harvey, Ladner,
// Lovasz, Tamir, "Semi-matchings for bipartite graphs and load balancing", 2006). So no worker moves unnecessarily, and
// a worker that cannot be shared out evenly stays where it is.
std::vector<Move> share_out(std::span<const Demand> demands, std::span<const AssignedWorker> hands);

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

// Divides `total` workers of one job among its ranks. The ranks train in step, so the job is as fast as the rank that
// waits longest for workers, and each further worker is assigned to that rank. Each gets at most the number that it can
// use. Ranks keep their workers as far as the total allows, unless a move gains kRankMoveGainMin.
std::vector<uint32_t> split_among_ranks(std::span<const RankClaim> ranks, uint32_t total);

}  // namespace penstock::scheduling
