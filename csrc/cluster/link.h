// SPDX-License-Identifier: Apache-2.0
#pragma once
// One end of a link between a trainer and a worker. The trainer numbers its links with a worker upwards, and each side
// numbers its messages on a link: 1, 2, 3. So each side can tell a message of a link that has ended, a message that
// comes twice and a message that did not come, whatever the connection below did with them. A link on which a message
// was lost is never mended: the trainer begins another and repeats the requests that it still wants.

#include <cstdint>

namespace penstock::cluster {

// A value type.
class Link {
 public:
  enum class Receipt : uint8_t {
    kNext,  // to be taken
    kOld,   // of a link that has ended, or seen before: to be dropped
    kGap,   // something before it was lost
  };

  explicit Link(uint32_t number = 0) : number_(number) {}

  uint32_t number() const { return number_; }

  // The stamp of the message that is sent now.
  uint64_t stamp() { return ++sent_; }
  // The stamp of the last message. Pings tell it, so that the loss of a last message shows.
  uint64_t sent() const { return sent_; }

  Receipt receive(uint32_t number, uint64_t stamp) {
    if (number != number_ || stamp <= received_) return Receipt::kOld;
    if (stamp != received_ + 1) return Receipt::kGap;
    received_ = stamp;
    return Receipt::kNext;
  }

 private:
  uint32_t number_;
  uint64_t sent_ = 0;
  uint64_t received_ = 0;
};

}  // namespace penstock::cluster
