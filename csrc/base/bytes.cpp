// SPDX-License-Identifier: Apache-2.0
#include "base/bytes.h"

#include <algorithm>
#include <array>
#include <cstdint>

namespace penstock {
namespace {

constexpr std::string_view kDigits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
constexpr uint8_t kNoDigit = 64;

constexpr std::array<uint8_t, 256> digit_values() {
  std::array<uint8_t, 256> values{};
  values.fill(kNoDigit);
  for (size_t value = 0; value < kDigits.size(); ++value)
    values[static_cast<uint8_t>(kDigits[value])] = static_cast<uint8_t>(value);
  return values;
}
constexpr std::array<uint8_t, 256> kValues = digit_values();

}  // namespace

std::string to_base64(std::span<const std::byte> bytes) {
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (size_t first = 0; first < bytes.size(); first += 3) {
    const size_t count = std::min<size_t>(3, bytes.size() - first);
    uint32_t word = 0;
    for (size_t index = 0; index < 3; ++index)
      word = word << 8 | (index < count ? std::to_integer<uint32_t>(bytes[first + index]) : 0);
    for (size_t index = 0; index < 4; ++index) text += index <= count ? kDigits[word >> (18 - 6 * index) & 63] : '=';
  }
  return text;
}

std::optional<std::vector<std::byte>> from_base64(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  std::vector<std::byte> bytes;
  bytes.reserve(text.size() / 4 * 3);
  for (size_t first = 0; first < text.size(); first += 4) {
    const std::string_view group = text.substr(first, 4);
    size_t count = 4;
    if (first + 4 == text.size())
      while (count > 2 && group[count - 1] == '=') --count;
    uint32_t word = 0;
    for (size_t index = 0; index < 4; ++index) {
      const uint8_t value = index < count ? kValues[static_cast<uint8_t>(group[index])] : 0;
      if (value == kNoDigit) return std::nullopt;
      word = word << 6 | value;
    }
    for (size_t index = 0; index + 1 < count; ++index)
      bytes.push_back(static_cast<std::byte>(word >> (16 - 8 * index) & 255));
  }
  return bytes;
}

}  // namespace penstock
