// SPDX-License-Identifier: Apache-2.0
#include "wire/message.h"

#include <algorithm>
#include <limits>

namespace penstock::wire {

uint32_t time_units(std::chrono::nanoseconds time) {
  const auto units = std::max<int64_t>(0, time / kTimeUnit);
  return static_cast<uint32_t>(std::min<int64_t>(units, std::numeric_limits<uint32_t>::max()));
}

uint16_t share_units(std::chrono::nanoseconds part, std::chrono::nanoseconds whole) {
  if (part.count() <= 0 || whole.count() <= 0) return 0;
  const double share = static_cast<double>(part.count()) / static_cast<double>(whole.count());
  return static_cast<uint16_t>(std::clamp(share * kShareUnit, 1.0, static_cast<double>(kShareUnit)));
}

}  // namespace penstock::wire
