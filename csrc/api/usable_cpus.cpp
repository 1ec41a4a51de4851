// SPDX-License-Identifier: Apache-2.0
#include "api/usable_cpus.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

namespace penstock::api {
namespace {

double affine_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return std::max(1, CPU_COUNT(&set));
}

// The quota in CPUs, at most `limit`; `limit` if the file is missing or has no limit ("max").
double quota_of(const std::string& folder, double limit) {
  std::ifstream file(folder + "/cpu.max");
  double quota = 0;
  double period = 0;
  return file >> quota >> period && quota > 0 && period > 0 ? std::min(limit, quota / period) : limit;
}

// The lowest quota of the process's cgroup and its ancestors. In a container the group may be named by its path on the
// host, of which only the mount point exists.
double within_quotas(double limit) {
  const std::string mount = "/sys/fs/cgroup";
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    if (!line.starts_with("0::")) continue;
    for (std::string group = line.substr(3); group.starts_with('/'); group.resize(group.rfind('/')))
      limit = quota_of(mount + group, limit);
  }
  return quota_of(mount, limit);
}

double local_ranks() {
  const char* const text = std::getenv("LOCAL_WORLD_SIZE");
  return text == nullptr ? 1 : std::max(1, std::atoi(text));
}

}  // namespace

uint32_t usable_cpus() { return static_cast<uint32_t>(std::max(1.0, within_quotas(affine_cpus()) / local_ranks())); }

}  // namespace penstock::api
