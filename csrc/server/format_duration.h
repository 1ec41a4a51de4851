// SPDX-License-Identifier: Apache-2.0
#pragma once
// Formats a duration for logs.

#include <chrono>
#include <string>

#include "base/instant.h"

namespace penstock::server {

// Rounded down to seconds, or to milliseconds if below a second.
inline std::string format_duration(Duration time) {
  using std::chrono::duration_cast;
  const auto seconds = duration_cast<std::chrono::seconds>(time).count();
  if (seconds > 0) return std::to_string(seconds) + " s";
  return std::to_string(duration_cast<std::chrono::milliseconds>(time).count()) + " ms";
}

}  // namespace penstock::server
