// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many of a cluster's CPUs each running job is to have, by each of the policies that share them as a pool. Pure. A
// CPU is a worker. How many a job asks for is its rule's (demand_rule.h).
//
// `penstock` shares out by cluster::gpu_progress, as a pool does. The other systems' rules are each about one job: each
// job has one CPU a GPU for sure, and the rest is granted in the order in which the jobs began.

#include <cstdint>
#include <span>
#include <vector>

#include "simulator/demand_rule.h"
#include "simulator/world.h"

namespace penstock::simulator {

struct PooledJob {
  uint64_t job_id = 0;
  uint32_t gpus = 1;
  uint32_t count = 0;  // CPUs that it has
  const DemandRule* rule = nullptr;
};

// In the order in which the jobs began.
std::vector<uint32_t> pooled_counts(CpuPolicy policy, std::span<const PooledJob> jobs, uint32_t cpu_count,
                                    const Settings& settings);

// Synergy's tuning inside one server: each demand if they fit; else the jobs with most beyond their share give back
// down to it until they do.
std::vector<double> tuned_counts(std::span<const double> demands, std::span<const double> shares, double cpu_count);

}  // namespace penstock::simulator
