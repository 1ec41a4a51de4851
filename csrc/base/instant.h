// SPDX-License-Identifier: Apache-2.0
#pragma once
// Time as the state machines are told it: a point of a clock that never goes back, whose zero means nothing. They read
// no clock of their own, so a simulator may run them by another.

#include <algorithm>
#include <chrono>
#include <optional>

namespace penstock {

using Duration = std::chrono::nanoseconds;
using Instant = std::chrono::time_point<std::chrono::steady_clock, Duration>;

inline Duration duration_of(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

// The earlier one of two times at which something may be due.
inline std::optional<Instant> earlier(std::optional<Instant> a, std::optional<Instant> b) {
  if (!a || !b) return a ? a : b;
  return std::min(*a, *b);
}

}  // namespace penstock
