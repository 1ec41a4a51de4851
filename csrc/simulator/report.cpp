// SPDX-License-Identifier: Apache-2.0
#include "simulator/report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "base/result.h"

namespace penstock::simulator {
namespace {

double mean(std::span<const double> values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// The smallest value for which `share` of the values are less or equal.
double quantile(std::span<const double> sorted, double share) {
  const double rank = std::ceil(share * static_cast<double>(sorted.size()));
  return sorted[static_cast<size_t>(std::max(rank, 1.0)) - 1];
}

// Student's t distribution, 97.5 %.
double t_quantile(size_t freedom) {
  constexpr std::array<double, 30> kTable{12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
                                          2.201,  2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
                                          2.080,  2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042};
  if (freedom <= kTable.size()) return kTable[freedom - 1];
  constexpr double kNormal = 1.95996;
  return kNormal + (kNormal * kNormal * kNormal + kNormal) / (4.0 * static_cast<double>(freedom));
}

}  // namespace

Report report_on(const std::vector<Job>& jobs, const Cluster& cluster, const Outcome& outcome) {
  PENSTOCK_ASSERT(!jobs.empty() && jobs.size() == outcome.jobs.size(), "every job must have an outcome");
  std::vector<double> completions_s, runs;
  for (size_t job = 0; job < jobs.size(); ++job) {
    completions_s.push_back(outcome.jobs[job].end_s - jobs[job].submit_s);
    runs.push_back(outcome.jobs[job].running_s);
  }
  std::vector<double> completions = completions_s;
  std::sort(completions.begin(), completions.end());
  const double makespan_s = outcome.end_s - outcome.begin_s;
  const double gpu_s = cluster.gpu_count() * makespan_s;
  const double cpu_s = 1.0 * cluster.server_count * cluster.cpus_per_server() * makespan_s;
  const double running_minutes = std::accumulate(runs.begin(), runs.end(), 0.0) / 60;
  const double operations = static_cast<double>(outcome.move_count + outcome.preempt_count);
  const double completion_mean_s = mean(completions), running_mean_s = mean(runs);
  return {.completion_mean_s = completion_mean_s,
          .completion_median_s = quantile(completions, 0.5),
          .completion_p99_s = quantile(completions, 0.99),
          .waiting_mean_s = completion_mean_s - running_mean_s,
          .running_mean_s = running_mean_s,
          .makespan_s = makespan_s,
          .gpu_allocated_share = outcome.gpu_held_s / gpu_s,
          .gpu_busy_share = outcome.gpu_busy_s / gpu_s,
          .cpu_used_share = outcome.cpu_busy_s / cpu_s,
          .operations_per_job_minute = operations / running_minutes,
          .moved_bytes = outcome.moved_bytes,
          .completions_s = std::move(completions_s)};
}

Result<PairedSpeedup> paired_speedup(std::span<const double> other_s, std::span<const double> own_s) {
  const auto is_bad = [](double time_s) { return !(time_s > 0) || !std::isfinite(time_s); };
  if (other_s.size() != own_s.size() || own_s.empty() || std::any_of(other_s.begin(), other_s.end(), is_bad) ||
      std::any_of(own_s.begin(), own_s.end(), is_bad))
    return Fault{Errc::kMalformed, "policies were compared by " + std::to_string(other_s.size()) + " and " +
                                       std::to_string(own_s.size()) +
                                       " times; the same number of positive times, at least one, is required"};
  std::vector<double> ratios;
  for (size_t pair = 0; pair < own_s.size(); ++pair) ratios.push_back(other_s[pair] / own_s[pair]);
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  PairedSpeedup speedup{.mean = mean(ratios), .least = *least, .most = *most};
  if (ratios.size() < 2) return speedup;
  double squares = 0;
  for (const double ratio : ratios) squares += (ratio - speedup.mean) * (ratio - speedup.mean);
  const auto count = static_cast<double>(ratios.size());
  const double half = t_quantile(ratios.size() - 1) * std::sqrt(squares / (count - 1) / count);
  speedup.interval_low = speedup.mean - half;
  speedup.interval_high = speedup.mean + half;
  return speedup;
}

GainParts gain_parts(const Report& other, const Report& own) {
  return {.waiting_s = other.waiting_mean_s - own.waiting_mean_s,
          .running_s = other.running_mean_s - own.running_mean_s};
}

}  // namespace penstock::simulator
