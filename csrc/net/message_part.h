// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of messages between hosts, as sent and as received. Neither direction copies a payload: a sent part stays
// in place until ZeroMQ has read it, and a received part stays in ZeroMQ's memory.

#include <array>
#include <cstddef>
#include <functional>
#include <span>

namespace penstock::net {

// One part to send. Without `release` the bytes are copied. With it they are not: they must stay unchanged until
// `release` is called, which happens exactly once, on any thread, even if the message could not be sent.
struct OutgoingPart {
  std::span<const std::byte> bytes;
  std::function<void()> release;
};

// One received part. Its bytes have no guaranteed alignment. Thread-compatible.
class ReceivedPart {
 public:
  ReceivedPart();
  ReceivedPart(ReceivedPart&& other) noexcept;
  ReceivedPart& operator=(ReceivedPart&& other) noexcept;
  ~ReceivedPart();

  std::span<const std::byte> bytes() const;

  // The zmq_msg_t, for this room's files that call ZeroMQ.
  void* handle() { return storage_.data(); }

 private:
  alignas(void*) std::array<std::byte, 64> storage_;
};

}  // namespace penstock::net
