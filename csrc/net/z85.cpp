// SPDX-License-Identifier: Apache-2.0
#include "net/z85.h"

#include <array>
#include <cstdint>
#include <limits>

#include "base/assert.h"

namespace penstock::net {
namespace {

constexpr std::string_view kDigits =
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";
constexpr uint64_t kBase = 85;
static_assert(kDigits.size() == kBase);
constexpr uint8_t kNoDigit = 0xff;

constexpr std::array<uint8_t, 256> kValues = [] {
  std::array<uint8_t, 256> values{};
  values.fill(kNoDigit);
  for (size_t value = 0; value < kDigits.size(); ++value) {
    values[static_cast<uint8_t>(kDigits[value])] = static_cast<uint8_t>(value);
  }
  return values;
}();

}  // namespace

void encode_z85(std::span<const std::byte> bytes, std::span<char> text) {
  PENSTOCK_ASSERT(bytes.size() % 4 == 0 && text.size() == bytes.size() / 4 * 5, "Z85 of ", bytes.size(), " bytes");
  for (size_t group = 0; group < bytes.size() / 4; ++group) {
    uint32_t number = 0;
    for (const std::byte byte : bytes.subspan(group * 4, 4)) number = number << 8 | static_cast<uint32_t>(byte);
    for (size_t place = 5; place-- > 0; number /= kBase) text[group * 5 + place] = kDigits[number % kBase];
  }
}

bool try_decode_z85(std::string_view text, std::span<std::byte> bytes) {
  if (bytes.size() % 4 != 0 || text.size() != bytes.size() / 4 * 5) return false;
  for (size_t group = 0; group < bytes.size() / 4; ++group) {
    uint64_t number = 0;
    for (const char digit : text.substr(group * 5, 5)) {
      const uint8_t value = kValues[static_cast<uint8_t>(digit)];
      if (value == kNoDigit) return false;
      number = number * kBase + value;
    }
    if (number > std::numeric_limits<uint32_t>::max()) return false;
    for (size_t place = 4; place-- > 0; number >>= 8) bytes[group * 4 + place] = static_cast<std::byte>(number & 0xff);
  }
  return true;
}

}  // namespace penstock::net
