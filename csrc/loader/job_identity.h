// SPDX-License-Identifier: Apache-2.0
#pragma once
// By what a pool's controller knows the trainers of one job, which are its ranks.

#include <cstdint>
#include <string>

#include "wire/reports.h"

namespace penstock::loader {

// The same text for all ranks of a job that torchrun, or any other launcher which sets MASTER_ADDR and MASTER_PORT, has
// started, and for no other job that runs at that time. Empty where the environment tells of no such job.
std::string identity_of_launched_job();

// `identity` is the job's, empty for a process on its own. A process with loaders of several names is in a group with
// each of them.
wire::JobRank job_rank(const std::string& identity, const std::string& job_name, uint32_t rank, uint32_t world_size);

}  // namespace penstock::loader
