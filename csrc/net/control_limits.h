// SPDX-License-Identifier: Apache-2.0
#pragma once
// What may cross a connection with a controller. Both sides have to have the same.

#include "net/curve_socket.h"
#include "wire/control_record.h"

namespace penstock::net {

inline wire::MessageLimits control_limits() {
  return {.part_bytes_max = wire::kControlBytesMax, .message_bytes_max = wire::kControlBytesMax};
}

}  // namespace penstock::net
