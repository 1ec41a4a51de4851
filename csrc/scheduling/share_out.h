// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which worker of a pool is assigned to which trainer: all trainers get the same number, up to the number that each
// wants, as far as there are workers that have not declined them. Pure; a scheduler that knows more about the jobs can
// replace it behind the same function.
//
// The result is max-min fair: no trainer could have one more without another one having less than that. To reach it
// from any state, the poorest trainer repeatedly receives a worker that is free or belongs to a trainer that has at
// least two more, if necessary through other trainers that receive a replacement (cost-reducing paths: Harvey, Ladner,
// Lovasz, Tamir, "Semi-matchings for bipartite graphs and load balancing", 2006). So no worker moves unnecessarily, and
// a worker that cannot be shared out evenly stays where it is.

#include <cstddef>
#include <cstdint>
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

std::vector<Move> share_out(std::span<const Demand> demands, std::span<const AssignedWorker> hands);

}  // namespace penstock::scheduling
