// SPDX-License-Identifier: Apache-2.0
#pragma once
// The id of one run of a controller, a worker or a trainer, and socket names.

#include <cstdint>
#include <string>

#include "base/result.h"

namespace penstock {

// 64 random bits from the system; never 0, which means no process.
Result<uint64_t> draw_identity();

// An id as its 16 hexadecimal digits.
std::string spoken_id(uint64_t id);

// A name for a socket on this machine that cannot be guessed: 128 random bits after a readable prefix.
std::string make_endpoint_name();

}  // namespace penstock
