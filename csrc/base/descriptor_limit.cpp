// SPDX-License-Identifier: Apache-2.0
#include "base/descriptor_limit.h"

#include <sys/resource.h>

#include <algorithm>

namespace penstock {

DescriptorLimit raise_descriptor_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return {};
  DescriptorLimit raised{.before = limit.rlim_cur, .now = limit.rlim_cur};
  limit.rlim_cur = std::max<rlim_t>(limit.rlim_cur, std::min<rlim_t>(limit.rlim_max, kDescriptorLimitMax));
  if (::setrlimit(RLIMIT_NOFILE, &limit) == 0) raised.now = limit.rlim_cur;
  return raised;
}

std::vector<std::string> spoken(const DescriptorLimit& limit) {
  std::vector<std::string> lines;
  const std::string has = "can have " + std::to_string(limit.now) + " files open";
  if (limit.now != limit.before) lines.push_back(has + "; the previous limit was " + std::to_string(limit.before));
  if (limit.now < kDescriptorLimitLeast)
    lines.push_back(has + ", and " + std::to_string(kDescriptorLimitLeast) +
                    " or more are recommended for connections and datasets; raise the hard limit (ulimit -Hn, "
                    "LimitNOFILE of a systemd unit)");
  return lines;
}

uint64_t descriptor_limit() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 0;
}

}  // namespace penstock
