// SPDX-License-Identifier: Apache-2.0
#include "net/keys.h"

#include <gtest/gtest.h>
#include <zmq.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace penstock::net {
namespace {

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
