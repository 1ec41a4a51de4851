// SPDX-License-Identifier: Apache-2.0
#pragma once
// The parts of a message between hosts, as they leave and as they arrive. Neither way copies a payload: a part that
// leaves stays in place until ZeroMQ has read it, and a part that arrives stays in ZeroMQ's own memory.

#include <array>
#include <cstddef>
#include <functional>
#include <span>

namespace penstock::net {

// One part to send. Without `release` the bytes are copied. With it they are not: they must stay as they are until
// `release` is called, which happens exactly once, on any thread, also when the message could not be sent.
struct OutgoingPart {
  std::span<const std::byte> bytes;
  std::function<void()> release;
};

// One part that arrived. Its bytes lie at any address, aligned to nothing. Thread-compatible.
class ReceivedPart {
 public:
  ReceivedPart();
  ReceivedPart(ReceivedPart&& other) noexcept;
  ReceivedPart& operator=(ReceivedPart&& other) noexcept;
  ~ReceivedPart();

  std::span<const std::byte> bytes() const;

  // The zmq_msg_t, for the files of this room that speak to ZeroMQ.
  void* handle() { return storage_.data(); }

 private:
  alignas(void*) std::array<std::byte, 64> storage_;
};

}  // namespace penstock::net
