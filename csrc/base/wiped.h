// SPDX-License-Identifier: Apache-2.0
#pragma once
// Secrets that leave nothing behind in memory that others are given later.

#include <array>
#include <cstddef>
#include <span>

namespace penstock {

// Volatile writes are not left out, although nothing reads them.
inline void wipe(std::span<std::byte> bytes) {
  volatile std::byte* place = bytes.data();
  for (size_t index = 0; index < bytes.size(); ++index) place[index] = std::byte{0};
}

// An array of bytes that is wiped when it is dropped, as is each copy of it. Thread-compatible.
template <size_t kSize>
struct WipedArray : std::array<std::byte, kSize> {
  ~WipedArray() { wipe(*this); }
};

}  // namespace penstock
