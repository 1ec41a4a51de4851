// SPDX-License-Identifier: Apache-2.0
#pragma once
// The number of CPUs that this process may use: limited by affinity, by the quotas of its cgroups (version 2), and by
// its share of a machine that several ranks train on.

#include <cstdint>

namespace penstock::api {

// At least 1.
uint32_t usable_cpus();

}  // namespace penstock::api
