// SPDX-License-Identifier: Apache-2.0
#pragma once
// Size limits of a pool's messages: caps on their parts, on the whole, and on the messages that wait in a socket.

#include <cstddef>
#include <cstdint>

namespace penstock::wire {

constexpr size_t kPartCountMax = 8;
constexpr uint64_t kPartBytesMax = uint64_t{8} << 20;
constexpr uint64_t kMessageBytesMax = kPartBytesMax + (uint64_t{64} << 10);
// The frames of a handshake must fit as well.
constexpr uint64_t kPartBytesMaxLeast = 1024;

// The limits of messages on a connection. Both sides have the same limits, since libzmq silently drops a message above
// the receiver's limit, and the connection with it.
struct MessageLimits {
  uint64_t part_bytes_max = kPartBytesMax;
  uint64_t message_bytes_max = kMessageBytesMax;  // all parts together
  // Limits of messages waiting to be read from one peer, and to be sent to it. They bound the memory that a misbehaving
  // peer can make this process hold; well-behaved peers are bounded by credits, in bytes.
  int received_messages_max = 64;
  int sent_messages_max = 1024;
};

}  // namespace penstock::wire
