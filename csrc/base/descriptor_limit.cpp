// SPDX-License-Identifier: Apache-2.0
#include "base/descriptor_limit.h"

#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>

#include "base/file_descriptor.h"

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

bool are_descriptors_short() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
  const FileDescriptor lowest(::eventfd(0, EFD_CLOEXEC));  // all below it are in use
  return !lowest || static_cast<rlim_t>(lowest.get()) >= limit.rlim_cur / 2;
}

}  // namespace penstock
