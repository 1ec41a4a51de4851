// SPDX-License-Identifier: Apache-2.0
#pragma once
// The number that one run of a controller, a worker or a trainer goes by, and names of sockets.

#include <cstdint>
#include <string>

#include "base/result.h"

namespace penstock {

// 64 bits from the system, not 0, which stands for nobody.
Result<uint64_t> draw_identity();

// The 16 hexadecimal digits that an id is shown as.
std::string spoken_id(uint64_t id);

// The name of a socket of this machine that nobody can guess: 128 random bits after a readable head.
std::string make_endpoint_name();

}  // namespace penstock
