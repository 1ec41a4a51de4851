// SPDX-License-Identifier: Apache-2.0
#include "scheduling/allocation.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>
#include <string_view>

namespace penstock::scheduling {
namespace {

constexpr size_t kNoJob = static_cast<size_t>(-1);
constexpr double kGainNoise = 1e-12;  // smaller differences are rounding errors

// The number of workers still available to each owner and in the pool.
class Room {
 public:
  Room(std::span<const JobClaim> claims, uint32_t worker_count, const AllocationOptions& options)
      : free_count_(worker_count), owners_(claims.size()) {
    std::map<std::string, size_t> places;
    for (const auto& [owner, quota] : options.quotas) {
      places[owner] = left_.size();
      left_.push_back(quota);
    }
    for (size_t job = 0; job < claims.size(); ++job)
      for (const std::string& owner : claims[job].owners)
        if (const auto place = places.find(owner); place != places.end()) owners_[job].push_back(place->second);
  }

  bool has_for(size_t job) const { return free_count_ > 0 && is_within_quotas(job); }
  bool is_within_quotas(size_t job) const {
    return std::all_of(owners_[job].begin(), owners_[job].end(), [&](size_t owner) { return left_[owner] > 0; });
  }
  // Whether a worker of `giver` counts towards every exhausted quota of `taker`.
  bool is_fit_giver(size_t giver, size_t taker) const {
    const std::vector<size_t>& givers = owners_[giver];
    return std::all_of(owners_[taker].begin(), owners_[taker].end(), [&](size_t owner) {
      return left_[owner] > 0 || std::find(givers.begin(), givers.end(), owner) != givers.end();
    });
  }
  void take(size_t job) {
    --free_count_;
    for (const size_t owner : owners_[job]) --left_[owner];
  }
  void give_back(size_t job) {
    ++free_count_;
    for (const size_t owner : owners_[job]) ++left_[owner];
  }

 private:
  uint32_t free_count_;
  std::vector<std::vector<size_t>> owners_;  // by job: indices into left_
  std::vector<uint32_t> left_;
};

// The owners of the jobs, by job: user numbers from 0.
std::vector<size_t> users_of(std::span<const JobClaim> claims) {
  std::map<std::string_view, size_t> numbers;
  std::vector<size_t> users;
  for (const JobClaim& claim : claims) users.push_back(numbers.try_emplace(claim.user, numbers.size()).first->second);
  return users;
}

// Gives one worker at a time to the user with the fewest workers, and there to the job with the fewest, among the jobs
// below their bounds.
std::vector<uint32_t> fill_evenly(std::span<const JobClaim> claims, std::span<const uint32_t> bounds, Room room,
                                  uint32_t user_bound = std::numeric_limits<uint32_t>::max()) {
  const std::vector<size_t> users = users_of(claims);
  std::vector<uint32_t> counts(claims.size(), 0);
  std::vector<uint32_t> user_counts(claims.size(), 0);
  const auto is_poorer = [&](size_t a, size_t b) {
    if (user_counts[users[a]] != user_counts[users[b]]) return user_counts[users[a]] < user_counts[users[b]];
    if (counts[a] != counts[b]) return counts[a] < counts[b];
    return claims[a].worker_count > claims[b].worker_count;
  };
  while (true) {
    size_t poorest = kNoJob;
    for (size_t job = 0; job < claims.size(); ++job) {
      if (counts[job] >= bounds[job] || user_counts[users[job]] >= user_bound || !room.has_for(job)) continue;
      if (poorest == kNoJob || is_poorer(job, poorest)) poorest = job;
    }
    if (poorest == kNoJob) return counts;
    room.take(poorest);
    ++counts[poorest];
    ++user_counts[users[poorest]];
  }
}

// Improves the current counts one worker at a time.
class Exchange {
 public:
  Exchange(std::span<const JobClaim> claims, uint32_t worker_count, const AllocationOptions& options)
      : options_(options),
        floors_(floor_counts(claims, worker_count, options)),
        counts_(floors_),
        room_(claims, worker_count, options) {
    for (const JobClaim& claim : claims) {
      std::vector<double> hull = concave_hull(claim.progress);
      for (double& value : hull) value *= claim.gpus * claim.priority;
      values_.push_back(std::move(hull));
    }
    for (size_t job = 0; job < claims.size(); ++job)
      for (uint32_t taken = 0; taken < counts_[job]; ++taken) room_.take(job);
    keep(claims);
  }

  std::vector<uint32_t> run() && {
    for (size_t job = best_to_grow(); job != kNoJob; job = best_to_grow()) grow(job);
    while (move_one()) {
    }
    return std::move(counts_);
  }

 private:
  double gain(size_t job) const {
    const std::vector<double>& value = values_[job];
    return counts_[job] + 1 < value.size() ? value[counts_[job] + 1] - value[counts_[job]] : 0.0;
  }
  double loss(size_t job) const {
    const std::vector<double>& value = values_[job];
    return counts_[job] < value.size() ? value[counts_[job]] - value[counts_[job] - 1] : 0.0;
  }
  void grow(size_t job) {
    room_.take(job);
    ++counts_[job];
  }

  // A job keeps the workers that it has and can use as long as there is room. Otherwise it loses workers where the loss
  // is smallest.
  void keep(std::span<const JobClaim> claims) {
    while (true) {
      size_t best = kNoJob;
      for (size_t job = 0; job < claims.size(); ++job) {
        const uint32_t of_use = std::min(claims[job].worker_count, claims[job].demand_count());
        if (counts_[job] >= of_use || !room_.has_for(job)) continue;
        if (best == kNoJob || gain(job) > gain(best)) best = job;
      }
      if (best == kNoJob) return;
      grow(best);
    }
  }

  size_t best_to_grow() const {
    size_t best = kNoJob;
    for (size_t job = 0; job < counts_.size(); ++job)
      if (room_.has_for(job) && gain(job) > kGainNoise && (best == kNoJob || gain(job) > gain(best))) best = job;
    return best;
  }

  // Makes the best single move, if it pays. A job of an owner at its quota takes workers only from that owner's jobs.
  bool move_one() {
    size_t from = kNoJob, to = kNoJob;
    double best = kGainNoise;
    const double useful = std::max(0.0, options_.horizon_s - options_.move_cost_s) / options_.horizon_s;
    const auto look = [&](size_t giver, size_t taker) {
      if (giver == kNoJob || taker == kNoJob || giver == taker) return;
      const double net = gain(taker) * useful - loss(giver);
      if (net > best) best = net, from = giver, to = taker;
    };
    const size_t cheapest = cheapest_giver([](size_t) { return true; });
    for (size_t job = 0; job < counts_.size(); ++job) {
      if (gain(job) * useful <= kGainNoise) continue;
      if (room_.is_within_quotas(job)) {
        look(cheapest, job);
      } else {
        look(cheapest_giver([&](size_t other) { return room_.is_fit_giver(other, job); }), job);
      }
    }
    if (to == kNoJob) return false;
    --counts_[from];
    room_.give_back(from);
    grow(to);
    return true;
  }

  template <typename Fit>
  size_t cheapest_giver(Fit is_fit) const {
    size_t cheapest = kNoJob;
    for (size_t job = 0; job < counts_.size(); ++job)
      if (counts_[job] > floors_[job] && is_fit(job) && (cheapest == kNoJob || loss(job) < loss(cheapest)))
        cheapest = job;
    return cheapest;
  }

  const AllocationOptions& options_;
  std::vector<uint32_t> floors_;
  std::vector<uint32_t> counts_;
  Room room_;
  std::vector<std::vector<double>> values_;  // by job and count
};

}  // namespace

uint32_t JobClaim::demand_count() const {
  if (progress.empty()) return 0;
  const auto first = std::find_if(progress.begin(), progress.end(),
                                  [&](double value) { return value >= progress.back() - kGainNoise; });
  return static_cast<uint32_t>(first - progress.begin());
}

std::vector<double> concave_hull(std::span<const double> curve) {
  std::vector<size_t> corners;
  const auto slope = [&](size_t a, size_t b) { return (curve[b] - curve[a]) / static_cast<double>(b - a); };
  for (size_t point = 0; point < curve.size(); ++point) {
    while (corners.size() >= 2 && slope(corners[corners.size() - 2], corners.back()) <= slope(corners.back(), point))
      corners.pop_back();
    corners.push_back(point);
  }
  std::vector<double> hull(curve.begin(), curve.end());
  for (size_t corner = 1; corner < corners.size(); ++corner) {
    const size_t begin = corners[corner - 1], end = corners[corner];
    for (size_t point = begin + 1; point < end; ++point)
      hull[point] = curve[begin] + slope(begin, end) * static_cast<double>(point - begin);
  }
  return hull;
}

std::vector<uint32_t> floor_counts(std::span<const JobClaim> claims, uint32_t worker_count,
                                   const AllocationOptions& options) {
  const std::vector<size_t> users = users_of(claims);
  std::vector<uint32_t> job_counts(claims.size(), 0);  // by user: number of jobs that can use workers
  for (size_t job = 0; job < claims.size(); ++job)
    if (claims[job].demand_count() > 0) ++job_counts[users[job]];
  const auto user_count = std::count_if(job_counts.begin(), job_counts.end(), [](uint32_t count) { return count > 0; });
  const double shared = std::clamp(options.floor_share, 0.0, 1.0) * worker_count;
  const auto part = [&](double count) { return count == 0 ? 0 : static_cast<uint32_t>(shared / count); };
  std::vector<uint32_t> bounds;
  for (size_t job = 0; job < claims.size(); ++job) {
    const JobClaim& claim = claims[job];
    uint32_t floor = part(static_cast<double>(user_count) * job_counts[users[job]]);
    if (claim.keeps_one && claim.worker_count > 0) floor = std::max(floor, 1U);
    bounds.push_back(std::min({claim.demand_count(), claim.floor_max, floor}));
  }
  // If a user has more served jobs than workers in its share, the jobs with the most workers keep one; if there are
  // more users than workers, one job of each user may keep one.
  const uint32_t user_bound = shared > 0 ? std::max(1U, part(static_cast<double>(user_count))) : 0;
  return fill_evenly(claims, bounds, Room(claims, worker_count, options), user_bound);
}

std::vector<uint32_t> gpu_progress(std::span<const JobClaim> claims, uint32_t worker_count,
                                   const AllocationOptions& options) {
  return Exchange(claims, worker_count, options).run();
}

std::vector<uint32_t> max_min(std::span<const JobClaim> claims, uint32_t worker_count,
                              const AllocationOptions& options) {
  std::vector<uint32_t> bounds;
  for (const JobClaim& claim : claims) bounds.push_back(claim.demand_count());
  return fill_evenly(claims, bounds, Room(claims, worker_count, options));
}

AllocationPolicy policy_named(std::string_view name) {
  if (name == "gpu-progress") return gpu_progress;
  if (name == "max-min") return max_min;
  return nullptr;
}

std::optional<std::string> check_allocation(std::span<const JobClaim> claims, uint32_t worker_count,
                                            const AllocationOptions& options, std::span<const uint32_t> counts) {
  if (counts.size() != claims.size())
    return "the policy assigned " + std::to_string(counts.size()) + " counts for " + std::to_string(claims.size()) +
           " jobs";
  uint64_t sum = 0;
  std::map<std::string, uint64_t> sums;
  for (size_t job = 0; job < claims.size(); ++job) {
    sum += counts[job];
    for (const std::string& owner : claims[job].owners) sums[owner] += counts[job];
  }
  if (sum > worker_count)
    return "the policy assigned " + std::to_string(sum) + " workers, but the pool has " + std::to_string(worker_count);
  for (const auto& [owner, quota] : options.quotas)
    if (const auto found = sums.find(owner); found != sums.end() && found->second > quota)
      return "the policy assigned " + std::to_string(found->second) + " workers to jobs of '" + owner +
             "', whose quota is " + std::to_string(quota);
  const std::vector<uint32_t> floors = floor_counts(claims, worker_count, options);
  for (size_t job = 0; job < claims.size(); ++job)
    if (counts[job] < floors[job])
      return "the policy assigned job " + std::to_string(claims[job].job_id) + " " + std::to_string(counts[job]) +
             " workers, fewer than its minimum of " + std::to_string(floors[job]);
  return std::nullopt;
}

}  // namespace penstock::scheduling
