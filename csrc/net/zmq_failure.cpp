// SPDX-License-Identifier: Apache-2.0
#include "net/zmq_failure.h"

#include <zmq.h>

namespace penstock::net {

Fault zmq_failure(const std::string& what) { return {Errc::kFailed, what + " failed: " + zmq_strerror(zmq_errno())}; }

}  // namespace penstock::net
