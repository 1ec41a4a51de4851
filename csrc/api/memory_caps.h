// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/result.h"

namespace penstock::api {

// The cap of one worker's shared memory, and of what a trainer receives batches into: PENSTOCK_ARENA_BYTES. kMalformed
// for what is no positive number.
Result<uint64_t> arena_bytes();
// The cap of a single object that a worker takes from a trainer: PENSTOCK_JOB_BYTES.
Result<uint64_t> job_bytes();

}  // namespace penstock::api
