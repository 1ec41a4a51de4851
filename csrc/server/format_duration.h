// SPDX-License-Identifier: Apache-2.0
#pragma once
// A duration as logs show it.

#include <chrono>
#include <string>

#include "base/instant.h"

namespace penstock::server {

// Rounded down to seconds, and below a second to milliseconds.
inline std::string format_duration(Duration time) {
  using std::chrono::duration_cast;
  const auto seconds = duration_cast<std::chrono::seconds>(time).count();
  if (seconds > 0) return std::to_string(seconds) + " s";
  return std::to_string(duration_cast<std::chrono::milliseconds>(time).count()) + " ms";
}

}  // namespace penstock::server
