// SPDX-License-Identifier: Apache-2.0
#pragma once
// One end of a link between a trainer and a worker. The trainer numbers its links with a worker in ascending order, and
// each side numbers its messages on a link: 1, 2, 3. So each side can detect messages of an ended link, duplicate
// messages and missing messages, regardless of the underlying connection. A link on which a message was lost is
// never repaired: the trainer opens another one and repeats the requests that it still wants.

#include <cstdint>

namespace penstock::session {

// A value type.
class Link {
 public:
  enum class Receipt : uint8_t {
    kNext,  // the next message: accept it
    kOld,   // from an ended link, or a duplicate: drop it
    kGap,   // an earlier message was lost
  };

  explicit Link(uint32_t number = 0) : number_(number) {}

  uint32_t number() const { return number_; }

  // The stamp for the message that is being sent.
  uint64_t stamp() { return ++sent_; }
  // The stamp of the last message. Pings contain it, so that the loss of a last message is detected.
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

}  // namespace penstock::session
