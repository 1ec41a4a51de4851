// SPDX-License-Identifier: Apache-2.0
#pragma once
// The work of an operator's commands: one question to a controller, and its answer.

#include <chrono>

#include "base/result.h"
#include "net/endpoint.h"
#include "net/key_ring.h"
#include "wire/control_record.h"

namespace penstock::controller {

// `keys` are those of the role operator. kClosed when the controller turns the key away or is another's, kTimeout when
// nothing answers there, kFailed with the controller's own words when it refuses the question. Blocks.
Result<wire::ControlMessage> ask_controller(const net::Endpoint& endpoint, const net::KeyRing& keys,
                                            const wire::ControlMessage& question,
                                            std::chrono::steady_clock::time_point deadline);

}  // namespace penstock::controller
