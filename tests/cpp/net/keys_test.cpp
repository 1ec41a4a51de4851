// SPDX-License-Identifier: Apache-2.0
#include "net/keys.h"

#include <gtest/gtest.h>
#include <zmq.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
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

static_assert(!std::is_copy_constructible_v<SecretKey> && !std::is_copy_assignable_v<SecretKey>);
static_assert(!std::is_copy_constructible_v<KeyPair> && !std::is_copy_assignable_v<KeyPair>);

TEST(Keys, APairThatWasGeneratedIsThePairOfItsSecret) {
  const KeyPair pair = KeyPair::generate();
  const auto again = KeyPair::parse_secret(pair.secret_text().text());
  ASSERT_TRUE(again);
  EXPECT_EQ(again.value().public_key(), pair.public_key());
  EXPECT_NE(KeyPair::generate().public_key(), pair.public_key());
}

TEST(Keys, LibzmqFindsTheSamePublicKeyForASecret) {
  const KeyPair pair = KeyPair::generate();
  const std::string secret(pair.secret_text().text());
  std::array<char, kKeyTextLength + 1> public_text{};
  ASSERT_EQ(zmq_curve_public(public_text.data(), secret.c_str()), 0);
  EXPECT_EQ(pair.public_key().text(), public_text.data());
}

TEST(Keys, APublicKeyIsReadFromItsText) {
  const PublicKey key = KeyPair::generate().public_key();
  EXPECT_EQ(key.text().size(), kKeyTextLength);
  EXPECT_EQ(PublicKey::parse(key.text()).value(), key);
}

TEST(Keys, ErrorsDoNotRepeatTheText) {
  const std::string text(kKeyTextLength, '~');
  for (const auto& error : {PublicKey::parse(text).error(), KeyPair::parse_secret(text).error(),
                            KeyPair::parse_secret(text.substr(1)).error()}) {
    EXPECT_EQ(error.code, Errc::kMalformed);
    EXPECT_EQ(error.message.find("~~"), std::string::npos) << error.message;
    EXPECT_NE(error.message.find("penstock keys"), std::string::npos) << error.message;
  }
}

TEST(Keys, ASecretIsWipedWhenItIsDroppedAndWhenItIsMovedFrom) {
  std::vector<std::byte> memory(sizeof(SecretKey));
  // Volatile, as the compiler knows that nobody may read an object that was destroyed.
  const volatile std::byte* view = memory.data();
  const auto is_zero = [&] {
    bool is_zero = true;
    for (size_t index = 0; index < sizeof(SecretKey); ++index) is_zero = is_zero && view[index] == std::byte{0};
    return is_zero;
  };
  auto* secret = std::construct_at(reinterpret_cast<SecretKey*>(memory.data()));
  std::fill(secret->bytes().begin(), secret->bytes().end(), std::byte{7});
  EXPECT_FALSE(is_zero());
  const SecretKey taken = std::move(*secret);
  EXPECT_TRUE(is_zero());
  std::fill(secret->bytes().begin(), secret->bytes().end(), std::byte{7});
  std::destroy_at(secret);
  EXPECT_TRUE(is_zero());
}

TEST(Keys, EveryRoleIsFoundByItsName) {
  for (const Role role : kRoles) EXPECT_EQ(find_role(role_name(role)), role);
  EXPECT_EQ(find_role("root"), std::nullopt);
  EXPECT_EQ(find_role(""), std::nullopt);
}

TEST(RunIds, IdHasTheBytesOfTheSpecification) {
  std::array<std::byte, kKeyBytes> key{};
  wire::RunSecret secret{};
  for (size_t place = 0; place < key.size(); ++place) key[place] = static_cast<std::byte>(place);
  for (size_t place = 0; place < secret.size(); ++place) secret[place] = static_cast<std::byte>(kKeyBytes + place);
  EXPECT_EQ(run_id_of(PublicKey(key), secret), 0x6cc1304ff5425038u);
}

TEST(RunIds, IdFollowsFromTheKeyAndFromEachBitOfTheSecret) {
  const PublicKey key = KeyPair::generate().public_key();
  const RunId run = draw_run_id(key);
  EXPECT_NE(run.id, 0u);
  EXPECT_EQ(run_id_of(key, run.secret), run.id);
  EXPECT_NE(run_id_of(KeyPair::generate().public_key(), run.secret), run.id);
  for (size_t bit = 0; bit < 8 * run.secret.size(); ++bit) {
    wire::RunSecret other = run.secret;
    other[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_NE(run_id_of(key, other), run.id) << bit;
  }
  EXPECT_NE(draw_run_id(key).id, run.id);
}

}  // namespace
}  // namespace penstock::net
