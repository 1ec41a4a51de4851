// SPDX-License-Identifier: Apache-2.0
#include "simulator/world.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace penstock::simulator {
namespace {

Result<void> draw_models(const std::vector<Job*>& jobs, const std::vector<Profile>& profiles,
                         std::array<double, 3> split, uint64_t seed) {
  constexpr std::array<std::string_view, 3> kClasses{"image", "language", "speech"};
  std::array<std::vector<size_t>, 3> of_class;
  double sum = 0;
  for (size_t kind = 0; kind < kClasses.size(); ++kind) {
    for (size_t profile = 0; profile < profiles.size(); ++profile)
      if (profiles[profile].model_class == kClasses[kind]) of_class[kind].push_back(profile);
    if (split[kind] < 0 || (split[kind] > 0 && of_class[kind].empty()))
      return Fault{Errc::kMalformed, "the split gives " + std::to_string(split[kind]) + " to the class " +
                                         std::string(kClasses[kind]) + ", which has a total of " +
                                         std::to_string(of_class[kind].size()) + " profiles"};
    sum += split[kind];
  }
  if (!(sum > 0)) return Fault{Errc::kMalformed, "the split is 0 for every class, but must have a positive share"};
  std::mt19937_64 random(seed);
  for (Job* job : jobs) {
    double point = sum * static_cast<double>(random() >> 11) * 0x1p-53;
    size_t kind = 0;
    while (kind + 1 < split.size() && (point >= split[kind] || split[kind] == 0)) point -= split[kind++];
    while (of_class[kind].empty()) --kind;
    job->profile = of_class[kind][random() % of_class[kind].size()];
  }
  return {};
}

}  // namespace

double Profile::speed(double cpus_per_gpu) const {
  if (cpus_per_gpu >= static_cast<double>(speeds.size())) return speeds.back();
  const auto below = static_cast<size_t>(cpus_per_gpu);
  const double low = below == 0 ? 0.0 : speeds[below - 1];
  const double part = cpus_per_gpu - static_cast<double>(below);
  return part == 0 ? low : low + part * (speeds[below] - low);
}

double Profile::cpus_needed() const {
  const auto first = std::find(speeds.begin(), speeds.end(), speeds.back());
  return static_cast<double>(first - speeds.begin() + 1);
}

std::optional<CpuPolicy> cpu_policy_named(std::string_view name) {
  const auto found = std::find(kCpuPolicyNames.begin(), kCpuPolicyNames.end(), name);
  if (found == kCpuPolicyNames.end()) return std::nullopt;
  return static_cast<CpuPolicy>(found - kCpuPolicyNames.begin());
}

Result<void> assign_models(std::vector<Job>& jobs, const std::vector<Profile>& profiles, std::array<double, 3> split,
                           uint64_t seed) {
  std::vector<Job*> drawn;
  for (Job& job : jobs) {
    if (job.model.empty()) {
      drawn.push_back(&job);
      continue;
    }
    const auto found = std::find_if(profiles.begin(), profiles.end(),
                                    [&](const Profile& profile) { return profile.model == job.model; });
    if (found == profiles.end())
      return Fault{Errc::kMalformed, "a job has the model '" + job.model + "', which is not among " +
                                         std::to_string(profiles.size()) + " profiles; use one of them, or no model"};
    job.profile = static_cast<size_t>(found - profiles.begin());
  }
  return drawn.empty() ? Result<void>{} : draw_models(drawn, profiles, split, seed);
}

Result<void> check_world(const std::vector<Job>& jobs, const std::vector<Profile>& profiles, const Cluster& cluster,
                         const Settings& settings) {
  if (cluster.gpu_count() == 0 || cluster.cpus_per_gpu == 0 || !(cluster.link_bytes_per_s >= 0))
    return Fault{Errc::kMalformed,
                 "the cluster has no server, GPU or CPU, or a negative bandwidth; at least one of each is required"};
  if (!(settings.interval_s > 0) || !(settings.horizon_s > 0) || !(settings.start_delay_s >= 0) ||
      !(settings.move_cost_s >= 0) || !(settings.noise >= 0) || !(settings.restart_cost_s >= 0))
    return Fault{Errc::kMalformed,
                 "an interval or a horizon is not positive, or a delay, a cost or the noise is negative"};
  for (const Profile& profile : profiles) {
    const bool rises = std::is_sorted(profile.speeds.begin(), profile.speeds.end());
    if (profile.speeds.empty() || !rises || !(profile.speeds.front() > 0) || !(profile.iteration_s > 0))
      return Fault{Errc::kMalformed,
                   "the profile of " + profile.model +
                       " has speeds that decrease or are not positive, but they must be positive and increasing"};
  }
  for (size_t job = 0; job < jobs.size(); ++job) {
    const Job& it = jobs[job];
    const std::string name = "job " + std::to_string(job);
    if (it.gpus == 0 || it.gpus > cluster.gpu_count())
      return Fault{Errc::kMalformed, name + " has " + std::to_string(it.gpus) + " GPUs, but must have 1 to " +
                                         std::to_string(cluster.gpu_count()) + ", inclusive"};
    if (!(it.duration_s > 0) || !(it.submit_s >= 0) || !std::isfinite(it.duration_s + it.submit_s))
      return Fault{Errc::kMalformed, name + " has a time that is negative or not a number, or no duration"};
    if (it.profile >= profiles.size()) return Fault{Errc::kMalformed, name + " has no profile"};
  }
  return {};
}

}  // namespace penstock::simulator
