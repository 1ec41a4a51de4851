// SPDX-License-Identifier: Apache-2.0
#pragma once
// When to make a silent connection anew. Bytes that were sent into a cut link wait in TCP, which tries again after
// twice as long each time: the link stays silent for up to as long again as it was cut. A new connection works at once.
// On a slow link it costs the bytes that were on their way, so the wait doubles each time.

#include <algorithm>

#include "base/instant.h"

namespace penstock::cluster {

constexpr Duration kRenewAfter = std::chrono::seconds(2);  // more than a lease
constexpr Duration kRenewAfterMax = std::chrono::seconds(32);

// A value type.
class RenewalClock {
 public:
  explicit RenewalClock(Instant now) : begun_at_(now) {}

  void heard(Instant now) {
    begun_at_ = now;
    patience_ = kRenewAfter;
  }
  // True when it is time, and not again before twice as long.
  bool take(Instant now) {
    if (now - begun_at_ < patience_) return false;
    begun_at_ = now;
    patience_ = std::min(2 * patience_, kRenewAfterMax);
    return true;
  }

 private:
  Instant begun_at_;
  Duration patience_ = kRenewAfter;
};

}  // namespace penstock::cluster
