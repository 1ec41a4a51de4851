// SPDX-License-Identifier: Apache-2.0
#include "server/blob_cache.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace penstock::server {
namespace {

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
