// SPDX-License-Identifier: Apache-2.0
#pragma once
// Time as it is passed to the state machines of session/ and scheduling/: a point of a clock that never goes back, with
// an arbitrary zero. They do not read a clock themselves, so a simulator may run them by another clock; live processes
// run them by clock_now().

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

inline Instant clock_now() { return std::chrono::time_point_cast<Duration>(std::chrono::steady_clock::now()); }

// The time from `now` until an event at `due`; negative, which means forever, if there is none. Rounded up, so that the
// event is due once the wait is over.
inline std::chrono::milliseconds wait_time(const std::optional<Instant>& due, Instant now) {
  if (!due) return std::chrono::milliseconds(-1);
  return std::chrono::ceil<std::chrono::milliseconds>(std::max(*due - now, Duration(0)));
}

}  // namespace penstock
