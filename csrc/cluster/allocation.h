// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many of a pool's workers each job gets. Which worker that is, share_out.h decides. Pure.
//
// `gpu_progress` maximises the sum over jobs of gpus * priority * progress. It starts from the present counts, gives
// free workers where they gain most, and then moves single workers from where they are missed least to where they gain
// most. The curves are concave hulls and the quotas nest in the pool's size, so a state that no such move improves is
// the best one. A move counts only if its gain over the horizon pays for the time in which the worker serves nobody:
//
//   gain * (horizon - moving cost) > loss * horizon
//
// `max_min` gives each user as many as any other, and so each job of a user, up to what they can use.

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace penstock::cluster {

struct JobClaim {
  uint64_t job_id = 0;
  uint32_t worker_count = 0;  // that it has now
  // By number of workers from 0 on, not decreasing: the share of the speed that the job has when it is never starved.
  // Beyond the end it stays what it is there. Only the concave hull counts.
  std::vector<double> progress{};
  uint32_t floor_max = std::numeric_limits<uint32_t>::max();  // no floor gives it more
  double gpus = 1;
  double priority = 1;
  std::vector<std::string> owners{};  // whose quotas it counts towards
  std::string user{};                 // users share evenly, and so do the jobs of each
  // While its user's even share is less than one worker for each job, a job that has workers keeps one: jobs that come
  // later do not stop it.
  bool keeps_one = false;

  // The fewest workers with which it is as fast as it gets.
  uint32_t demand_count() const;
};

// What a pool lays down: no trainer has less than an even share while that keeps it busier, and a worker moves for a
// gain of a third or more.
constexpr double kPoolFloorShare = 1;
constexpr double kPoolMoveCostS = 15;
constexpr double kPoolHorizonS = 60;

struct AllocationOptions {
  // No job has less than min(its demand, its floor_max, floor_share * an even share), unless an owner's quota forbids
  // it. Users whose jobs have use for workers share evenly, and then such jobs of a user.
  double floor_share = 0;
  double move_cost_s = 0;  // for which a moved worker serves nobody
  double horizon_s = 60;   // over which a gain is counted
  // The most workers of all jobs of an owner; none: no bound. Of two owners that share a job, all jobs of the one are
  // jobs of the other.
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

// What is wrong with the counts of a policy, in a sentence; none: nothing.
std::optional<std::string> check_allocation(std::span<const JobClaim> claims, uint32_t worker_count,
                                            const AllocationOptions& options, std::span<const uint32_t> counts);

// The concave hull of a curve, at the same points.
std::vector<double> concave_hull(std::span<const double> curve);
// The counts that the floors come to, within the quotas and the pool's size.
std::vector<uint32_t> floor_counts(std::span<const JobClaim> claims, uint32_t worker_count,
                                   const AllocationOptions& options);

}  // namespace penstock::cluster
