// SPDX-License-Identifier: Apache-2.0
#pragma once
// The limit of open files of a process. A server process needs one descriptor per connection, including connections of
// strangers that never show a key; files that a dataset opens count against the same limit. The usual soft limit of
// 1,024 is meant for programs that call select(); the hard limit is the machine's.

#include <cstdint>
#include <string>
#include <vector>

namespace penstock {

// More than any process of a pool needs. Programs that a dataset starts inherit the limit, and some of them close every
// descriptor up to it at startup: with the limit of 1,000,000,000 in some containers that takes minutes.
constexpr uint64_t kDescriptorLimitMax = 1 << 20;
// Below this limit a server process warns: it keeps fewer connections that have shown no key (net/connection_budget.h),
// and a large pool has more members than the process has descriptors.
constexpr uint64_t kDescriptorLimitLeast = 4096;

struct DescriptorLimit {
  uint64_t before = 0;
  uint64_t now = 0;
};
// Raises this process's soft limit to its hard limit, but at most to kDescriptorLimitMax. Only for penstock's server
// processes: a training program keeps its limit.
DescriptorLimit raise_descriptor_limit();
// Log lines: that the limit has changed, and that it is still too low.
std::vector<std::string> spoken(const DescriptorLimit& limit);

// The soft limit of this process; 0 if the system does not report it.
uint64_t descriptor_limit();

}  // namespace penstock
