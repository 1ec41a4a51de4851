// SPDX-License-Identifier: Apache-2.0
#pragma once
// Time as it is passed to the state machines: a point of a clock that never goes back, with an arbitrary zero. They do
// not read a clock themselves, so a simulator may run them by another clock.

#include <algorithm>
#include <chrono>
#include <optional>

namespace penstock {

using Duration = std::chrono::nanoseconds;
using Instant = std::chrono::time_point<std::chrono::steady_clock, Duration>;

inline Duration duration_of(double seconds) {
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

// The earlier of two times at which something may be due.
inline std::optional<Instant> earlier(std::optional<Instant> a, std::optional<Instant> b) {
  if (!a || !b) return a ? a : b;
  return std::min(*a, *b);
}

}  // namespace penstock
