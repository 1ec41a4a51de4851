// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many of a cluster's CPUs each running job gets, by each of the policies that share them as a pool. Pure. A CPU is
// a worker. A job's demand rule (demand_rule.h) determines how many it requests.
//
// `penstock` allocates with scheduling::gpu_progress, as a pool does. The other systems' rules each concern a single
// job: every job is guaranteed one CPU per GPU, and the rest is granted in the order in which the jobs started.

#include <cstdint>
#include <span>
#include <vector>

#include "simulator/demand_rule.h"
#include "simulator/world.h"

namespace penstock::simulator {

struct PooledJob {
  uint64_t job_id = 0;
  uint32_t gpus = 1;
  uint32_t count = 0;  // current CPUs
  const DemandRule* rule = nullptr;
};

// In the order in which the jobs started.
std::vector<uint32_t> pooled_counts(CpuPolicy policy, std::span<const PooledJob> jobs, uint32_t cpu_count,
                                    const Settings& settings);

// Synergy's tuning within one server: each job gets its demand if all demands fit; otherwise the job with the largest
// excess over its share is reduced, at most to that share, and then the next one, until they fit.
std::vector<double> tuned_counts(std::span<const double> demands, std::span<const double> shares, double cpu_count);

}  // namespace penstock::simulator
