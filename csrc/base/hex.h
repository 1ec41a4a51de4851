// SPDX-License-Identifier: Apache-2.0
#pragma once
// Bytes as hexadecimal digits in lower case.

#include <cstdint>
#include <string>
#include <string_view>

namespace penstock {

inline constexpr std::string_view kHexDigits = "0123456789abcdef";

// Appends the two digits of a byte.
inline void append_hex(std::string& text, uint8_t byte) {
  text += kHexDigits[byte >> 4];
  text += kHexDigits[byte & 15];
}

}  // namespace penstock
