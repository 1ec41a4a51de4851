// SPDX-License-Identifier: Apache-2.0
#include "net/seal.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../base/left_bytes.h"

namespace penstock::net {
namespace {

using Bytes = std::vector<std::byte>;
using wire::kSealTagBytes;
using wire::SealCipher;

Bytes from_hexadecimal(std::string_view text) {
  Bytes bytes;
  for (size_t place = 0; place + 1 < text.size(); place += 2)
    bytes.push_back(static_cast<std::byte>(std::stoi(std::string(text.substr(place, 2)), nullptr, 16)));
  return bytes;
}

SealKey key_of(const Bytes& bytes) {
  SealKey key;
  std::copy(bytes.begin(), bytes.end(), key.bytes().begin());
  return key;
}

class SealTest : public testing::TestWithParam<SealCipher> {
 protected:
  SealTest() { EXPECT_TRUE(sealer_.seal(5, head_, plain_, sealed_)); }

  bool opens(uint64_t counter, const Bytes& head, const Bytes& sealed, Opener& opener) {
    Bytes plain(sealed.size() - kSealTagBytes);
    const bool is_open = opener.open(counter, head, sealed, plain);
    EXPECT_TRUE(!is_open || plain == plain_);
    return is_open;
  }

  const SealKey key_ = key_of(Bytes(32, std::byte{1}));
  Sealer sealer_ = Sealer::make(GetParam(), key_).value();
  Opener opener_ = Opener::make(GetParam(), key_).value();
  const Bytes head_ = Bytes(64, std::byte{2});
  const Bytes plain_ = Bytes(1000, std::byte{3});
  Bytes sealed_ = Bytes(1000 + kSealTagBytes);
};

TEST_P(SealTest, WhatWasSealedIsOpened) {
  EXPECT_TRUE(opens(5, head_, sealed_, opener_));
  EXPECT_EQ(std::search(sealed_.begin(), sealed_.end(), plain_.begin(), plain_.begin() + 8), sealed_.end());
}

TEST_P(SealTest, MessageWithoutBytesHasASealOfItsHead) {
  Bytes tag(kSealTagBytes);
  ASSERT_TRUE(sealer_.seal(6, head_, {}, tag));
  EXPECT_TRUE(opener_.open(6, head_, tag, {}));
  auto other = head_;
  other[0] ^= std::byte{1};
  EXPECT_FALSE(opener_.open(6, other, tag, {}));
}

TEST_P(SealTest, AnyFlippedBitIsSeen) {
  for (size_t bit = 0; bit < 8 * head_.size(); ++bit) {
    auto head = head_;
    head[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_FALSE(opens(5, head, sealed_, opener_)) << bit;
  }
  for (size_t bit = 0; bit < 8 * sealed_.size(); bit += 13) {
    auto sealed = sealed_;
    sealed[bit / 8] ^= std::byte{1} << (bit % 8);
    ASSERT_FALSE(opens(5, head_, sealed, opener_)) << bit;
  }
  EXPECT_TRUE(opens(5, head_, sealed_, opener_)) << "an opener goes on after a message that it refused";
}

TEST_P(SealTest, TruncatedMessageAnotherNumberAndAnotherKeyAreSeen) {
  for (const size_t size : {kSealTagBytes, size_t{500}, sealed_.size() - 1})
    EXPECT_FALSE(opens(5, head_, Bytes(sealed_.begin(), sealed_.begin() + static_cast<std::ptrdiff_t>(size)), opener_));
  EXPECT_FALSE(opens(4, head_, sealed_, opener_));
  EXPECT_FALSE(opens(5 + (uint64_t{1} << 32), head_, sealed_, opener_));
  Opener other = Opener::make(GetParam(), key_of(Bytes(32, std::byte{2}))).value();
  EXPECT_FALSE(opens(5, head_, sealed_, other));
}

INSTANTIATE_TEST_SUITE_P(Ciphers, SealTest, testing::Values(SealCipher::kAes256Gcm, SealCipher::kChaCha20Poly1305));

// Another implementation, Python's cryptography 48, gave these: key 00 01 .. 1f, nonce 00 x 11 and 07, the
// head "head" and the text "plain".
TEST(Seal, BytesAreThoseOfTheStandards) {
  Bytes key(32);
  for (size_t place = 0; place < key.size(); ++place) key[place] = static_cast<std::byte>(place);
  const std::string_view head = "head";
  const std::string_view plain = "plain";
  const std::pair<SealCipher, std::string_view> expected[] = {
      {SealCipher::kAes256Gcm, "9001727679ffe833a7685404a4c732a789fd8eb3d4"},
      {SealCipher::kChaCha20Poly1305, "582a742a204559896a2161b2852ef390ec459eeedd"}};
  for (const auto& [cipher, hexadecimal] : expected) {
    Sealer sealer = Sealer::make(cipher, key_of(key)).value();
    Bytes sealed(plain.size() + kSealTagBytes);
    ASSERT_TRUE(sealer.seal(7, std::as_bytes(std::span(head)), std::as_bytes(std::span(plain)), sealed));
    EXPECT_EQ(sealed, from_hexadecimal(hexadecimal));
  }
}

class Agreement : public testing::Test {
 protected:
  static SealTerms terms(SealCipher cipher, const SealNonce& trainers, const SealNonce& workers, const LinkName& name) {
    return agree(cipher, trainers, workers, name).value();
  }
  static bool is_same(const SealKey& one, const SealKey& other) {
    return std::ranges::equal(one.bytes(), other.bytes());
  }

  const SealNonce trainers_ = draw_seal_nonce().value();
  const SealNonce workers_ = draw_seal_nonce().value();
  const LinkName name_{.trainer_id = 1, .worker_id = 2, .link = 3};
  const SealTerms terms_ = terms(SealCipher::kAes256Gcm, trainers_, workers_, name_);
};

TEST_F(Agreement, BothSidesHaveTheSameKeysAndADirectionHasItsOwn) {
  const auto again = terms(SealCipher::kAes256Gcm, trainers_, workers_, name_);
  EXPECT_TRUE(is_same(terms_.to_trainer, again.to_trainer));
  EXPECT_TRUE(is_same(terms_.to_worker, again.to_worker));
  EXPECT_TRUE(terms_.ticket.is(again.ticket.text()));
  EXPECT_FALSE(is_same(terms_.to_trainer, terms_.to_worker));
}

TEST_F(Agreement, EverythingThatTheLinkIsGoesIntoItsKeys) {
  const SealNonce drawn = draw_seal_nonce().value();
  const SealTerms others[] = {
      terms(SealCipher::kChaCha20Poly1305, trainers_, workers_, name_),
      terms(SealCipher::kAes256Gcm, drawn, workers_, name_),
      terms(SealCipher::kAes256Gcm, trainers_, drawn, name_),
      terms(SealCipher::kAes256Gcm, trainers_, workers_, {.trainer_id = 9, .worker_id = 2, .link = 3}),
      terms(SealCipher::kAes256Gcm, trainers_, workers_, {.trainer_id = 1, .worker_id = 9, .link = 3}),
      terms(SealCipher::kAes256Gcm, trainers_, workers_, {.trainer_id = 1, .worker_id = 2, .link = 9}),
  };
  for (const SealTerms& other : others) {
    EXPECT_FALSE(is_same(terms_.to_trainer, other.to_trainer));
    EXPECT_FALSE(is_same(terms_.to_worker, other.to_worker));
    EXPECT_FALSE(terms_.ticket.is(other.ticket.text()));
  }
}

TEST_F(Agreement, KeysAreWipedWithTheTermsThatHaveThem) {
  for (const auto key : {&SealTerms::to_trainer, &SealTerms::to_worker}) {
    SealTerms terms{.cipher = SealCipher::kAes256Gcm};
    const Bytes secret(32, std::byte{7});
    std::copy(secret.begin(), secret.end(), (terms.*key).bytes().begin());
    EXPECT_FALSE(test::leaves<SealTerms>(secret, std::move(terms)));
  }
}

// Of so few characters that they lie in the ticket itself, whose memory can be looked at.
TEST_F(Agreement, TicketIsWipedWhenItIsDropped) {
  const std::string text = "fifteen letters";
  EXPECT_FALSE(test::leaves<Ticket>(std::as_bytes(std::span(text)), text));
}

TEST_F(Agreement, AesIsChosenWhereBothComputeItFast) {
  const uint8_t chacha = wire::cipher_bit(SealCipher::kChaCha20Poly1305);
  EXPECT_EQ(choose_cipher(wire::kSealCiphers, wire::kSealCiphers), SealCipher::kAes256Gcm);
  EXPECT_EQ(choose_cipher(wire::kSealCiphers, chacha), SealCipher::kChaCha20Poly1305);
  EXPECT_EQ(choose_cipher(chacha, wire::kSealCiphers), SealCipher::kChaCha20Poly1305);
  EXPECT_NE(fast_ciphers() & chacha, 0);
}

}  // namespace
}  // namespace penstock::net
