// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many files a process may have open. A process that serves needs one for each connection, and for each one of a
// stranger who never shows a key; what a dataset opens comes out of the same number. The usual soft limit of 1,024 is
// for programs that call select(); the hard limit is what the machine has.

#include <cstdint>
#include <string>
#include <vector>

namespace penstock {

// More than any process of a pool needs. Programs that a dataset starts have the limit, too, and some of them close
// every descriptor up to it as they begin: with the thousand million of some containers that takes minutes.
constexpr uint64_t kDescriptorLimitMax = 1 << 20;
// Below it a process that serves warns: it keeps fewer connections that have shown no key (net/connection_budget.h),
// and a large pool has more members than it has descriptors.
constexpr uint64_t kDescriptorLimitLeast = 4096;

struct DescriptorLimit {
  uint64_t before = 0;
  uint64_t now = 0;
};
// Raises this process's soft limit to its hard one, or to kDescriptorLimitMax. For processes of penstock's own that
// serve: a program that trains keeps what it was given.
DescriptorLimit raise_descriptor_limit();
// For a log: that the limit has changed, and that it is too low all the same.
std::vector<std::string> spoken(const DescriptorLimit& limit);

// The soft limit of this process; 0 if the system does not tell.
uint64_t descriptor_limit();

}  // namespace penstock
