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

constexpr Duration kRemakePause = std::chrono::milliseconds(100);
constexpr Duration kRemakePauseMax = std::chrono::milliseconds(1600);

// When to begin a link after one whose messages did not fit together. The first one begins at once. While no answer
// counts, each further one begins twice as long after the one before it: every link costs an agreement on keys, a
// connection and all requests again, and a worker or a device on the way that damages each of them would otherwise have
// the trainer do that as fast as messages cross. A value type.
class RemakeClock {
 public:
  // An answer counted.
  void counted() { pause_ = Duration(0); }
  // When to begin the link after the one that ends now.
  Instant take(Instant now) {
    begun_at_ = std::max(now, begun_at_ + pause_);
    pause_ = std::clamp(2 * pause_, kRemakePause, kRemakePauseMax);
    return begun_at_;
  }

 private:
  Instant begun_at_{};  // the link that was begun last because another did not hold
  Duration pause_{};
};

}  // namespace penstock::cluster
