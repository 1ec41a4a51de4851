// SPDX-License-Identifier: Apache-2.0
#pragma once
// Secrets that are erased from memory before it is reused.

#include <array>
#include <cstddef>
#include <span>

namespace penstock {

// The compiler cannot remove volatile writes, although they are never read.
inline void wipe(std::span<std::byte> bytes) {
  volatile std::byte* place = bytes.data();
  for (size_t index = 0; index < bytes.size(); ++index) place[index] = std::byte{0};
}

// An array of bytes that is wiped when it is destroyed, as is each copy of it. Thread-compatible.
template <size_t kSize>
struct WipedArray : std::array<std::byte, kSize> {
  ~WipedArray() { wipe(*this); }
};

}  // namespace penstock
