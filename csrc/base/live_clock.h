// SPDX-License-Identifier: Apache-2.0
#pragma once
// The clock by which live processes run the state machines of session/ and scheduling/.

#include <algorithm>
#include <chrono>
#include <optional>

#include "base/instant.h"

namespace penstock {

inline Instant clock_now() { return std::chrono::time_point_cast<Duration>(std::chrono::steady_clock::now()); }

// The time from `now` until an event at `due`; negative, which means forever, if there is none. Rounded up, so that the
// event is due once the wait is over.
inline std::chrono::milliseconds wait_time(const std::optional<Instant>& due, Instant now) {
  if (!due) return std::chrono::milliseconds(-1);
  return std::chrono::ceil<std::chrono::milliseconds>(std::max(*due - now, Duration(0)));
}

}  // namespace penstock
