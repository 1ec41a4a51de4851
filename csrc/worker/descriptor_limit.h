// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many files a worker may have open. Each connection to its port takes one, also one of a stranger who never shows
// a key, and so does what the dataset opens. The usual soft limit of 1,024 is for programs that call select(); the hard
// limit is what the machine has.

#include <cstdint>

namespace penstock::worker {

// More than any worker needs. Programs that a dataset starts have the limit, too, and some of them close every
// descriptor up to it as they begin: with the thousand million of some containers that takes minutes.
constexpr uint64_t kDescriptorLimitMax = 1 << 20;

struct DescriptorLimit {
  uint64_t before = 0;
  uint64_t now = 0;
};
// Raises this process's soft limit to its hard one, or to kDescriptorLimitMax. For worker processes only.
DescriptorLimit raise_descriptor_limit();

// Whether half of the files that this process may have open, or more, are open, or the system has no descriptor left.
bool are_descriptors_short();

}  // namespace penstock::worker
