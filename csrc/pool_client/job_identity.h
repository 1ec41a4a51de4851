// SPDX-License-Identifier: Apache-2.0
#pragma once
// Identifies the trainers of one job, its ranks, to a pool's controller.

#include <cstdint>
#include <string>

#include "wire/reports.h"

namespace penstock::pool_client {

// Returns the same text for all ranks of a job that was started by torchrun, or by any other launcher that sets
// MASTER_ADDR and MASTER_PORT, and a different text for any other job that runs at that time. Empty if the environment
// does not describe such a job.
std::string identity_of_launched_job();

// `identity` is the job's, empty for a process without other ranks. A process with loaders of several names is in one
// group for each name.
wire::JobRank job_rank(const std::string& identity, const std::string& job_name, uint32_t rank, uint32_t world_size);

}  // namespace penstock::pool_client
