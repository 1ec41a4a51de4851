// SPDX-License-Identifier: Apache-2.0
#pragma once
// The message limits of a connection with a controller. Both sides must use the same.

#include "net/tcp_socket.h"
#include "wire/control_record.h"

namespace penstock::net {

inline wire::MessageLimits control_limits() {
  return {.part_bytes_max = wire::kControlBytesMax, .message_bytes_max = wire::kControlBytesMax};
}

}  // namespace penstock::net
