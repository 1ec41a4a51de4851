// SPDX-License-Identifier: Apache-2.0
#pragma once
// How large a message of a pool may be: caps on its parts, on the whole, and on the messages that wait in a socket.

#include <cstddef>
#include <cstdint>

namespace penstock::wire {

constexpr size_t kPartCountMax = 8;
constexpr uint64_t kPartBytesMax = uint64_t{8} << 20;
constexpr uint64_t kMessageBytesMax = kPartBytesMax + (uint64_t{64} << 10);
// A handshake's own frames have to pass as well.
constexpr uint64_t kPartBytesMaxLeast = 1024;

// The limits of messages on a connection. Both sides have the same limits, since libzmq drops a message above the
// receiver's in silence, and the connection with it.
struct MessageLimits {
  uint64_t part_bytes_max = kPartBytesMax;
  uint64_t message_bytes_max = kMessageBytesMax;  // all parts together
  // Messages that may wait to be read from one peer, and to be sent to it. They bound the memory that a peer that
  // behaves badly can make this process hold; peers that behave well are bounded by credits, in bytes.
  int received_messages_max = 64;
  int sent_messages_max = 1024;
};

}  // namespace penstock::wire
