// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many of a pool's workers each job gets. share_out.h decides which workers these are. Pure.
//
// `gpu_progress` maximises the sum over jobs of gpus * priority * progress. It starts from the current counts, gives
// free workers to the jobs that gain most, and then moves single workers from the jobs that lose least to the jobs that
// gain most. The curves are concave hulls and the quotas nest in the pool's size, so a state that no such move improves
// is optimal. A move counts only if its gain over the horizon pays for the time in which the worker serves no job:
//
//   gain * (horizon - moving cost) > loss * horizon
//
// `max_min` gives the same number of workers to each user, and to each job of a user, up to the number that they can
// use.

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::scheduling {

struct JobClaim {
  uint64_t job_id = 0;
  uint32_t worker_count = 0;  // current number of workers
  // By number of workers, from 0, not decreasing: the job's speed as a share of the speed at which it is never starved.
  // Constant beyond the end. Only the concave hull counts.
  std::vector<double> progress{};
  uint32_t floor_max = std::numeric_limits<uint32_t>::max();  // no floor exceeds it
  double gpus = 1;
  double priority = 1;
  std::vector<std::string> owners{};  // whose quotas it counts towards
  std::string user{};                 // users share evenly, and so do the jobs of each user
  // While its user's even share is less than one worker per job, a job that has workers keeps one, so later jobs do not
  // stop it.
  bool keeps_one = false;

  // The smallest number of workers at which it reaches its full speed.
  uint32_t demand_count() const;
};

// Pool settings: no trainer has less than an even share, up to the number of workers that keeps it busy, and a worker
// moves for a gain of a third or more.
constexpr double kPoolFloorShare = 1;
constexpr double kPoolMoveCostS = 15;
constexpr double kPoolHorizonS = 60;

struct AllocationOptions {
  // No job has less than min(its demand, its floor_max, floor_share * an even share), unless an owner's quota forbids
  // it. An even share divides the pool among the users whose jobs can use workers, and then among these jobs of a user.
  double floor_share = 0;
  double move_cost_s = 0;  // time for which a moved worker serves no job
  double horizon_s = 60;   // the period over which a gain is counted
  // The maximum number of workers of all jobs of an owner; an owner without an entry has no bound. If two owners share
  // a job, all jobs of one of them are jobs of the other.
  std::map<std::string, uint32_t> quotas{};
};

using AllocationPolicy = std::vector<uint32_t> (*)(std::span<const JobClaim>, uint32_t worker_count,
                                                   const AllocationOptions&);

std::vector<uint32_t> gpu_progress(std::span<const JobClaim> claims, uint32_t worker_count,
                                   const AllocationOptions& options);
std::vector<uint32_t> max_min(std::span<const JobClaim> claims, uint32_t worker_count,
                              const AllocationOptions& options);

// "gpu-progress" or "max-min"; nullptr for any other name.
AllocationPolicy policy_named(std::string_view name);

// A message about an error in the counts of a policy; none if they are valid.
std::optional<std::string> check_allocation(std::span<const JobClaim> claims, uint32_t worker_count,
                                            const AllocationOptions& options, std::span<const uint32_t> counts);

// The concave hull of a curve, at the same points.
std::vector<double> concave_hull(std::span<const double> curve);
// The counts guaranteed by the floors, within the quotas and the pool's size.
std::vector<uint32_t> floor_counts(std::span<const JobClaim> claims, uint32_t worker_count,
                                   const AllocationOptions& options);

}  // namespace penstock::scheduling
