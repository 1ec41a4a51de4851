// SPDX-License-Identifier: Apache-2.0
#include "net/z85.h"

#include <gtest/gtest.h>
#include <zmq.h>

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "../base/seeded_test.h"

namespace penstock::net {
namespace {

class Z85 : public test::SeededTest {
 protected:
  static std::string encoded(std::span<const std::byte> bytes) {
    std::string text(bytes.size() / 4 * 5, '\0');
    encode_z85(bytes, text);
    return text;
  }
  static bool is_decoded(std::string_view text, size_t size) {
    std::vector<std::byte> bytes(size);
    return try_decode_z85(text, bytes);
  }
};

TEST_F(Z85, TheExampleOfItsSpecificationComesOut) {
  constexpr std::array<unsigned char, 8> kExample = {0x86, 0x4f, 0xd2, 0x6f, 0xb5, 0x59, 0xf7, 0x5b};
  EXPECT_EQ(encoded(std::as_bytes(std::span(kExample))), "HelloWorld");
}

TEST_F(Z85, RandomKeysAreWrittenAsLibzmqWritesThemAndReadBack) {
  for (int round = 0; round < 200; ++round) {
    std::array<std::byte, 32> key{};
    for (std::byte& byte : key) byte = static_cast<std::byte>(draw(0, 255));
    std::array<char, 41> expected{};
    zmq_z85_encode(expected.data(), reinterpret_cast<const uint8_t*>(key.data()), key.size());
    const std::string text = encoded(key);
    EXPECT_EQ(text, expected.data());
    std::array<std::byte, 32> back{};
    ASSERT_TRUE(try_decode_z85(text, back));
    EXPECT_EQ(back, key);
  }
}

TEST_F(Z85, WhatIsNoTextOfThatManyBytesIsRefused) {
  EXPECT_TRUE(is_decoded("HelloWorld", 8));
  EXPECT_FALSE(is_decoded("HelloWorl", 8));
  EXPECT_FALSE(is_decoded("HelloWorld!", 8));
  EXPECT_FALSE(is_decoded("HelloWorld", 4));
  EXPECT_FALSE(is_decoded("Hello", 3));
  EXPECT_TRUE(is_decoded("", 0));
}

TEST_F(Z85, EveryCharacterOutsideOfTheAlphabetIsRefused) {
  int accepted_count = 0;
  for (int character = 0; character < 256; ++character) {
    std::string text = "00000";
    text[4] = static_cast<char>(character);
    accepted_count += is_decoded(text, 4) ? 1 : 0;
  }
  EXPECT_EQ(accepted_count, 85);
}

TEST_F(Z85, DigitsAboveThirtyTwoBitsAreRefused) {
  EXPECT_TRUE(is_decoded("%nSc0", 4));  // 2^32 - 1
  EXPECT_FALSE(is_decoded("%nSc1", 4));
  EXPECT_FALSE(is_decoded("#####", 4));
}

}  // namespace
}  // namespace penstock::net
