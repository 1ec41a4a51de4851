// SPDX-License-Identifier: Apache-2.0
#pragma once
// How many CPUs this process may use: by affinity, by the quotas of its cgroups (version 2), and by its share of a
// machine that several ranks train on.

#include <cstdint>

namespace penstock::api {

// At least 1.
uint32_t usable_cpus();

}  // namespace penstock::api
