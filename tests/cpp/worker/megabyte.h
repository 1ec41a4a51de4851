// SPDX-License-Identifier: Apache-2.0
#pragma once
// A size that the tests count in.

#include <cstdint>

namespace penstock::worker {

inline constexpr uint64_t kMegabyte = 1 << 20;

}  // namespace penstock::worker
