// SPDX-License-Identifier: Apache-2.0
#include "simulator/cpu_policy.h"

#include <algorithm>
#include <numeric>

#include "base/assert.h"
#include "scheduling/allocation.h"

namespace penstock::simulator {
namespace {

std::vector<uint32_t> granted(std::span<const PooledJob> jobs, uint32_t cpu_count) {
  std::vector<uint32_t> counts;
  uint32_t left = cpu_count;
  for (const PooledJob& job : jobs) {
    counts.push_back(std::clamp(job.rule->demand(), 1U, job.gpus));
    left -= counts.back();
  }
  for (size_t job = 0; job < jobs.size(); ++job) {
    const uint32_t more = std::min(left, std::max(jobs[job].rule->demand(), counts[job]) - counts[job]);
    counts[job] += more;
    left -= more;
  }
  return counts;
}

// Each GPU of a job has a separate trainer, as in live jobs, and all trainers of a job make the same claim.
std::vector<uint32_t> allocated(std::span<const PooledJob> jobs, uint32_t cpu_count, const Settings& settings) {
  std::vector<scheduling::JobClaim> claims;
  for (const PooledJob& job : jobs) {
    scheduling::JobClaim claim{.job_id = job.job_id, .floor_max = (job.rule->busy_count() + job.gpus - 1) / job.gpus};
    const uint32_t most = (std::min(job.rule->demand(), cpu_count) + job.gpus - 1) / job.gpus;
    for (uint32_t count = 0; count <= most; ++count) claim.progress.push_back(job.rule->progress(count * job.gpus));
    for (uint32_t gpu = 0; gpu < job.gpus; ++gpu) {
      claim.worker_count = job.count / job.gpus + (gpu < job.count % job.gpus ? 1 : 0);
      claims.push_back(claim);
    }
  }
  const scheduling::AllocationOptions options{
      .floor_share = settings.floor_share, .move_cost_s = settings.move_cost_s, .horizon_s = settings.horizon_s};
  const std::vector<uint32_t> of_trainers = scheduling::gpu_progress(claims, cpu_count, options);
  const auto fault = scheduling::check_allocation(claims, cpu_count, options, of_trainers);
  PENSTOCK_ASSERT(!fault, *fault);
  std::vector<uint32_t> counts;
  auto next = of_trainers.begin();
  for (const PooledJob& job : jobs) {
    counts.push_back(std::accumulate(next, next + job.gpus, 0U));
    next += job.gpus;
  }
  return counts;
}

}  // namespace

std::vector<uint32_t> pooled_counts(CpuPolicy policy, std::span<const PooledJob> jobs, uint32_t cpu_count,
                                    const Settings& settings) {
  return policy == CpuPolicy::kPenstock ? allocated(jobs, cpu_count, settings) : granted(jobs, cpu_count);
}

std::vector<double> tuned_counts(std::span<const double> demands, std::span<const double> shares, double cpu_count) {
  std::vector<double> counts(demands.begin(), demands.end());
  double beyond = std::accumulate(counts.begin(), counts.end(), 0.0) - cpu_count;
  while (beyond > 1e-9) {
    size_t largest = 0;
    for (size_t job = 1; job < counts.size(); ++job)
      if (counts[job] - shares[job] > counts[largest] - shares[largest]) largest = job;
    const double given_back = std::min(beyond, counts[largest] - shares[largest]);
    if (given_back <= 0) break;
    counts[largest] -= given_back;
    beyond -= given_back;
  }
  return counts;
}

}  // namespace penstock::simulator
