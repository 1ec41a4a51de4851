// SPDX-License-Identifier: Apache-2.0
#pragma once
// The number that one run of a controller, a worker or a trainer goes by.

#include <cstdint>

#include "base/result.h"

namespace penstock::transport {

// 64 bits from the system, not 0, which stands for nobody.
Result<uint64_t> draw_identity();

}  // namespace penstock::transport
