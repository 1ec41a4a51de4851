// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "base/result.h"

namespace penstock::api {

// The limit on a worker's shared memory, and on the memory that a trainer receives batches into: PENSTOCK_ARENA_BYTES.
// kMalformed if it is not a positive number.
Result<uint64_t> arena_bytes();
// The limit on a single object that a worker accepts from a trainer: PENSTOCK_JOB_BYTES.
Result<uint64_t> job_bytes();

}  // namespace penstock::api
