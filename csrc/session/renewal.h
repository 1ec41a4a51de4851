// SPDX-License-Identifier: Apache-2.0
#pragma once
// When to replace a silent connection. Bytes that were sent into a cut link wait in TCP, whose retransmission timeout
// doubles each time: the connection remains silent for up to as long again as the link was cut. A new connection works
// immediately. On a slow link it loses the bytes in transit, so the wait doubles each time.

#include <algorithm>

#include "base/instant.h"

namespace penstock::session {

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
  // Returns true when it is time, and the next time after twice as long.
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

// When to open a link after one whose messages did not fit together. The first one is opened immediately. Until an
// answer counts, the interval between links doubles: every link costs a key agreement, a connection and a repetition of
// all requests, and a worker or a device in transit that damages each of them would otherwise make the trainer repeat
// this as fast as messages cross. A value type.
class RemakeClock {
 public:
  // An answer counted.
  void counted() { pause_ = Duration(0); }
  // When to open the link after the one that ends now.
  Instant take(Instant now) {
    begun_at_ = std::max(now, begun_at_ + pause_);
    pause_ = std::clamp(2 * pause_, kRemakePause, kRemakePauseMax);
    return begun_at_;
  }

 private:
  Instant begun_at_{};  // start of the last replacement link
  Duration pause_{};
};

}  // namespace penstock::session
