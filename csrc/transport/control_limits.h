// SPDX-License-Identifier: Apache-2.0
#pragma once
// What may cross a connection with a controller. Both sides have to have the same.

#include "transport/control_record.h"
#include "transport/curve_socket.h"

namespace penstock::transport {

inline MessageLimits control_limits() {
  return {.part_bytes_max = kControlBytesMax, .message_bytes_max = kControlBytesMax};
}

}  // namespace penstock::transport
