// SPDX-License-Identifier: Apache-2.0
#pragma once
// shard_by_rank: the loader shares the samples of one order out over the ranks of a job.

#include <cstdint>
#include <optional>

#include "penstock/options.h"
#include "sampling/rank_share.h"

namespace penstock::api {

// The options with what follows from ranks filled in: the rank, the size of its batches, and a generator that is the
// same on all ranks. As they are without shard_by_rank. Throws Error kValue for options that cannot be had, in Python's
// words.
Options with_ranks(Options options);

// The part of the rank in an epoch that begins at its beginning; none without shard_by_rank. Of options with ranks.
std::optional<sampling::RankShareOptions> share_of(const Options& options);

}  // namespace penstock::api
