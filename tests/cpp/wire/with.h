// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstring>
#include <vector>

namespace penstock::wire {

// A record in which `value` stands at `offset`.
template <typename T>
std::vector<std::byte> with(std::vector<std::byte> bytes, size_t offset, T value) {
  std::memcpy(bytes.data() + offset, &value, sizeof value);
  return bytes;
}

}  // namespace penstock::wire
