// SPDX-License-Identifier: Apache-2.0
#pragma once
// Time as the state machines are told it: a point of a clock that never goes back, whose zero means nothing. They read
// no clock of their own, so a simulator may run them by another.

#include <chrono>

namespace penstock::cluster {

using Duration = std::chrono::nanoseconds;
using Instant = std::chrono::time_point<std::chrono::steady_clock, Duration>;

}  // namespace penstock::cluster
