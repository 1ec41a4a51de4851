// SPDX-License-Identifier: Apache-2.0
#pragma once
// The limits of messages on a connection with a controller. Both sides need the same.

#include "net/tcp_socket.h"
#include "wire/control_record.h"

namespace penstock::net {

inline wire::MessageLimits control_limits() {
  return {.part_bytes_max = wire::kControlBytesMax, .message_bytes_max = wire::kControlBytesMax};
}

}  // namespace penstock::net
