// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <zmq.h>

#include <string>

#include "base/result.h"

namespace penstock::net {

// What a call of libzmq's has just failed with.
inline Fault zmq_failure(const std::string& what) {
  return {Errc::kFailed, what + " failed: " + zmq_strerror(zmq_errno())};
}

}  // namespace penstock::net
