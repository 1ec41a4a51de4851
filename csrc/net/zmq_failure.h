// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <string>

#include "base/result.h"

namespace penstock::net {

// The error of the libzmq call that has just failed.
Fault zmq_failure(const std::string& what);

}  // namespace penstock::net
