// SPDX-License-Identifier: Apache-2.0
#pragma once
// The core of the operator's commands: one question to a controller and its answer.

#include <chrono>

#include "base/result.h"
#include "net/endpoint.h"
#include "net/keys.h"
#include "wire/control_record.h"

namespace penstock::controller {

// `keys` are the keys of the role operator. Returns kClosed if the controller rejects the key or has other keys,
// kTimeout if no controller answers, and kFailed with the controller's reason if it refuses the question. Blocks.
Result<wire::ControlMessage> query_controller(const net::Endpoint& endpoint, const net::KeyRing& keys,
                                              const wire::ControlMessage& question,
                                              std::chrono::steady_clock::time_point deadline);

}  // namespace penstock::controller
