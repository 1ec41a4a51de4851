// SPDX-License-Identifier: Apache-2.0
#pragma once
// shard_by_rank: the loader shares the samples of one order out over the ranks of a job.

#include <cstdint>
#include <optional>

#include "penstock/options.h"
#include "sampling/rank_share.h"

namespace penstock::api {

// A process of a job, of so many.
struct JobPlace {
  int64_t rank = 0;
  int64_t world_size = 1;
};

// The place that the options name, or that of the environment's RANK and WORLD_SIZE, or else the only one. Throws Error
// kValue for numbers that make no rank.
JobPlace place_in_job(const Options& options);

// The options with what follows from ranks filled in: the rank, the size of its batches, and a generator that is the
// same on all ranks. As they are without shard_by_rank. Throws Error kValue for options that cannot be had, in Python's
// words.
Options with_ranks(Options options);

// The part of the rank in an epoch that begins at its beginning; none without shard_by_rank. Of options with ranks.
std::optional<sampling::RankShareOptions> share_of(const Options& options);

}  // namespace penstock::api
