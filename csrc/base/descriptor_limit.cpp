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

uint64_t descriptor_limit() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 0;
}

}  // namespace penstock
