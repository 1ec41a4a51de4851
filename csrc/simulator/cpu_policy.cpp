// SPDX-License-Identifier: Apache-2.0
#include "simulator/cpu_policy.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/assert.h"
#include "cluster/allocation.h"

namespace penstock::simulator {
namespace {

// By tf.data service's formula. A new job has its share.
uint32_t wanted_count(const PooledJob& job, uint32_t share) {
  if (job.count == 0) return share;
  return std::min(static_cast<uint32_t>(std::ceil(job.needed_count)), std::min(4 * job.count, job.count + 500));
}

std::vector<uint32_t> granted(std::span<const PooledJob> jobs, std::span<const uint32_t> wanted, uint32_t cpu_count) {
  std::vector<uint32_t> counts;
  uint32_t left = cpu_count;
  for (size_t job = 0; job < jobs.size(); ++job) {
    counts.push_back(std::min(std::max(wanted[job], 1U), jobs[job].gpus));
    left -= counts.back();
  }
  for (size_t job = 0; job < jobs.size(); ++job) {
    const uint32_t more = std::min(left, std::max(wanted[job], counts[job]) - counts[job]);
    counts[job] += more;
    left -= more;
  }
  return counts;
}

std::vector<uint32_t> allocated(std::span<const PooledJob> jobs, uint32_t cpu_count, uint32_t cpus_per_gpu,
                                const Settings& settings) {
  std::vector<cluster::JobClaim> claims;
  for (const PooledJob& job : jobs) {
    const double needed =
        std::clamp(job.count == 0 ? 1.0 * job.gpus * cpus_per_gpu : job.needed_count, 1.0, 1.0 * cpu_count);
    cluster::JobClaim claim{.job_id = job.job_id, .worker_count = job.count, .gpus = 1.0 * job.gpus};
    // Workers beyond what the link lets through are of no use.
    for (uint32_t count = 0; count < needed; ++count) claim.progress.push_back(std::min(count / needed, job.share_max));
    claim.progress.push_back(std::min(1.0, job.share_max));
    // What waits for a full link is free for a job beside it.
    if (job.share_max < 1) claim.worker_count = std::min(claim.worker_count, claim.demand_count());
    claims.push_back(std::move(claim));
  }
  const cluster::AllocationOptions options{
      .floor_share = settings.floor_share, .move_cost_s = settings.move_cost_s, .horizon_s = settings.horizon_s};
  std::vector<uint32_t> counts = cluster::gpu_progress(claims, cpu_count, options);
  const auto fault = cluster::check_allocation(claims, cpu_count, options, counts);
  PENSTOCK_ASSERT(!fault, *fault);
  return counts;
}

}  // namespace

double measured_need(double worker_s, double trainer_s) { return worker_s / std::max(trainer_s, 1e-9); }

std::vector<uint32_t> pooled_counts(CpuPolicy policy, std::span<const PooledJob> jobs, uint32_t cpu_count,
                                    uint32_t cpus_per_gpu, const Settings& settings) {
  if (policy == CpuPolicy::kPenstock) return allocated(jobs, cpu_count, cpus_per_gpu, settings);
  std::vector<uint32_t> wanted;
  for (const PooledJob& job : jobs) wanted.push_back(wanted_count(job, job.gpus * cpus_per_gpu));
  return granted(jobs, wanted, cpu_count);
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
