// SPDX-License-Identifier: Apache-2.0
#pragma once
// shard_by_rank: the loader divides the samples of one order among the ranks of a job.

#include <cstdint>
#include <optional>

#include "penstock/options.h"
#include "sampling/rank_share.h"

namespace penstock::api {

// A process's rank in a job, and the number of ranks.
struct JobPlace {
  int64_t rank = 0;
  int64_t world_size = 1;
};

// The rank from the options, or from the environment's RANK and WORLD_SIZE, else 0 of 1. Throws Error kValue for
// invalid numbers.
JobPlace place_in_job(const Options& options);

// Fills in the options that depend on the rank: the rank, the size of its batches, and a generator that is the same on
// all ranks. Without shard_by_rank, returns the options unchanged. Throws Error kValue for unsupported options, with
// Python's messages.
Options with_ranks(Options options);

// The rank's share of an epoch that starts at its first sample; none without shard_by_rank. Takes options that
// with_ranks() returned.
std::optional<sampling::RankShareOptions> share_of(const Options& options);

}  // namespace penstock::api
