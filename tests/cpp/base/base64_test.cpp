// SPDX-License-Identifier: Apache-2.0
#include "base/base64.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace penstock {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) { return std::as_bytes(std::span(text)); }

// RFC 4648, section 10.
TEST(Base64, WritesAndReadsTheExamplesOfItsStandard) {
  const std::vector<std::pair<std::string, std::string>> examples = {{"", ""},
                                                                     {"f", "Zg=="},
                                                                     {"fo", "Zm8="},
                                                                     {"foo", "Zm9v"},
                                                                     {"foob", "Zm9vYg=="},
                                                                     {"fooba", "Zm9vYmE="},
                                                                     {"foobar", "Zm9vYmFy"}};
  for (const auto& [plain, text] : examples) {
    EXPECT_EQ(to_base64(bytes_of(plain)), text);
    const auto bytes = from_base64(text);
    ASSERT_TRUE(bytes.has_value()) << text;
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes->data()), bytes->size()), plain);
  }
}

TEST(Base64, EveryByteComesBack) {
  std::vector<std::byte> bytes;
  for (int value = 0; value < 256; ++value) bytes.push_back(static_cast<std::byte>(value));
  EXPECT_EQ(from_base64(to_base64(bytes)), bytes);
}

TEST(Base64, WhatIsNoneGivesNothing) {
  for (const char* text : {"Z", "Zg", "Zg=", "Z===", "====", "Zm9?", "Zm=v", "Zg==Zg=="})
    EXPECT_FALSE(from_base64(text)) << text;
}

}  // namespace
}  // namespace penstock
