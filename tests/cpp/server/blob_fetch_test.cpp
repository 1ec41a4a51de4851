// SPDX-License-Identifier: Apache-2.0
#include "server/blob_fetch.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock::server {
namespace {

using wire::BlobPiece;
using wire::kBlobPieceBytesMax;

class BlobFetchTest : public testing::Test {
 protected:
  std::vector<uint64_t> wishes() {
    std::vector<uint64_t> offsets;
    for (const auto& wish : fetch_.take_requests(now_)) offsets.push_back(wish.offset);
    return offsets;
  }
  Result<void> receive(uint64_t offset, uint64_t total_bytes, uint64_t bytes = kBlobPieceBytesMax) {
    const std::vector<std::byte> piece(std::min(bytes, total_bytes - offset));
    return fetch_.receive({.id = {}, .offset = offset, .total_bytes = total_bytes}, piece, now_);
  }

  BlobFetch fetch_{{}, uint64_t{1} << 30};
  Instant now_{};
};

using Offsets = std::vector<uint64_t>;

TEST_F(BlobFetchTest, TwoWishesAreUnansweredOnceTheSizeIsKnown) {
  EXPECT_EQ(wishes(), (Offsets{0}));
  EXPECT_EQ(wishes(), (Offsets{}));
  ASSERT_TRUE(receive(0, 3 * kBlobPieceBytesMax));
  EXPECT_EQ(wishes(), (Offsets{kBlobPieceBytesMax, 2 * kBlobPieceBytesMax}));
  ASSERT_TRUE(receive(kBlobPieceBytesMax, 3 * kBlobPieceBytesMax));
  EXPECT_EQ(wishes(), (Offsets{}));
  EXPECT_FALSE(fetch_.is_whole());
  ASSERT_TRUE(receive(2 * kBlobPieceBytesMax, 3 * kBlobPieceBytesMax));
  EXPECT_TRUE(fetch_.is_whole());
  EXPECT_EQ(fetch_.take_bytes().size(), 3 * kBlobPieceBytesMax);
}

TEST_F(BlobFetchTest, WhatDoesNotComeIsWishedForAgainFromWhereItStopped) {
  wishes();
  now_ += kBlobPatience;
  EXPECT_EQ(wishes(), (Offsets{0}));
  ASSERT_TRUE(receive(0, 3 * kBlobPieceBytesMax));
  wishes();
  ASSERT_TRUE(receive(2 * kBlobPieceBytesMax, 3 * kBlobPieceBytesMax));  // the one before it was lost
  EXPECT_EQ(fetch_.due_at(), now_ + kBlobPatience);
  now_ += kBlobPatience;
  EXPECT_EQ(wishes(), (Offsets{kBlobPieceBytesMax, 2 * kBlobPieceBytesMax}));
}

TEST_F(BlobFetchTest, SmallerPiecesAreTakenTooAndTheSamePieceOnce) {
  wishes();
  for (uint64_t offset = 0; offset < 1000; offset += 100) {
    ASSERT_TRUE(receive(offset, 1000, 100));
    ASSERT_TRUE(receive(offset, 1000, 100));
    const bool is_last = offset == 900;
    EXPECT_EQ(wishes(), is_last ? Offsets{} : Offsets{offset + 100});
  }
  EXPECT_TRUE(fetch_.is_whole());
  EXPECT_EQ(fetch_.take_bytes().size(), 1000u);
}

TEST_F(BlobFetchTest, AnotherSizeOrOneAboveTheCapIsRefused) {
  ASSERT_TRUE(receive(0, 1000, 100));
  EXPECT_EQ(receive(100, 1001, 100).error().code, Errc::kMismatch);
  EXPECT_EQ(receive(0, uint64_t{1} << 31, 100).error().code, Errc::kTooLarge);
}

net::PublicKey key_of(uint8_t number) {
  std::array<std::byte, net::kKeyBytes> bytes{};
  bytes.front() = std::byte{number};
  return net::PublicKey(bytes);
}

wire::BlobId id_of(uint8_t number) {
  wire::BlobId id{};
  id.front() = std::byte{number};
  return id;
}

std::vector<std::byte> blob(uint64_t size, uint8_t content = 1) {
  return std::vector<std::byte>(size, std::byte{content});
}

TEST(BlobCacheTest, GivesAPartToJobsOfItsKeyAlone) {
  BlobCache cache;
  cache.put(key_of(1), id_of(7), blob(10));
  ASSERT_NE(cache.find(key_of(1), id_of(7)), nullptr);
  EXPECT_EQ(*cache.find(key_of(1), id_of(7)), blob(10));
  EXPECT_EQ(cache.find(key_of(2), id_of(7)), nullptr);
  EXPECT_EQ(cache.find(key_of(1), id_of(8)), nullptr);
  cache.put(key_of(2), id_of(7), blob(10, 2));
  EXPECT_EQ(*cache.find(key_of(1), id_of(7)), blob(10));
  EXPECT_EQ(*cache.find(key_of(2), id_of(7)), blob(10, 2));
}

TEST(BlobCacheTest, LetsTheOldestGoWhereAllAreTooLarge) {
  BlobCache cache;
  constexpr uint64_t kThird = kCachedBlobBytesMax / 3;
  for (uint8_t number = 1; number <= 4; ++number) cache.put(key_of(1), id_of(number), blob(kThird));
  EXPECT_EQ(cache.find(key_of(1), id_of(1)), nullptr);
  for (uint8_t number = 2; number <= 4; ++number) EXPECT_NE(cache.find(key_of(1), id_of(number)), nullptr);
  cache.put(key_of(1), id_of(5), blob(kCachedBlobBytesMax));
  EXPECT_EQ(cache.find(key_of(1), id_of(4)), nullptr);
  EXPECT_NE(cache.find(key_of(1), id_of(5)), nullptr);
  cache.put(key_of(1), id_of(6), blob(kCachedBlobBytesMax + 1));
  EXPECT_EQ(cache.find(key_of(1), id_of(6)), nullptr);
  EXPECT_NE(cache.find(key_of(1), id_of(5)), nullptr);
}

}  // namespace
}  // namespace penstock::server
