// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many of a pool's workers each trainer gets: as many as any other, but no more than it wants. Pure; a scheduler
// that knows more of the jobs takes its place behind the same function.

#include <cstdint>
#include <span>
#include <vector>

namespace penstock::cluster {

struct Demand {
  uint64_t trainer_id = 0;
  uint32_t worker_count = 0;      // that it has
  uint32_t worker_count_max = 0;  // that it can use
};

// By demand, in its order; together no more than `worker_count`. A worker that cannot be shared out evenly stays with a
// trainer that has more already, so that no worker moves without need; then the lower trainer id has it.
std::vector<uint32_t> fair_shares(std::span<const Demand> demands, uint32_t worker_count);

}  // namespace penstock::cluster
