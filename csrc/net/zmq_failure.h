// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <string>

#include "base/result.h"

namespace penstock::net {

// What a call of libzmq's has just failed with.
Fault zmq_failure(const std::string& what);

}  // namespace penstock::net
