// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which worker of a pool goes to which trainer: each trainer has as many as any other, up to the number that it wants,
// and as far as there are workers that have not declined it. Pure; a scheduler that knows more of the jobs takes its
// place behind the same function.
//
// It is max-min fair: nobody could have one more without another having less than that. Such a share-out is reached
// from whatever there is by giving the poorest, over and over, a worker that is free or of one who has two more, if
// need be by way of others that have the one replaced (cost-reducing paths: Harvey, Ladner, Lovasz, Tamir,
// "Semi-matchings for bipartite graphs and load balancing", 2006). So no worker moves without need, and one that cannot
// be shared out evenly stays where it is.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace penstock::cluster {

struct Demand {
  uint64_t trainer_id = 0;
  uint32_t worker_count_max = 0;  // that it can use
};

// A worker that stays.
struct AssignedWorker {
  enum class State : uint8_t {
    kFree,    // can be given to a trainer now
    kHeld,    // works for `trainer_id`
    kMoving,  // was taken from a trainer that it has not left yet
    kStray,   // works for somebody whom it was not given to, and can be given to a trainer that finds no other
  };
  State state = State::kFree;
  uint64_t trainer_id = 0;  // of kHeld, one of the demands
  // The worker that was given last is taken first: it has the least of the job's data in its caches.
  uint64_t given_order = 0;
  std::span<const uint64_t> declined{};  // trainers
};

struct Move {
  size_t hand = 0;
  uint64_t trainer_id = 0;  // that gets it; 0: it is taken from the one that has it

  friend bool operator==(const Move&, const Move&) = default;
};

std::vector<Move> share_out(std::span<const Demand> demands, std::span<const AssignedWorker> hands);

}  // namespace penstock::cluster
