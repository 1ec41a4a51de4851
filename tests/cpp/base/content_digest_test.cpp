// SPDX-License-Identifier: Apache-2.0
#include "base/content_digest.h"

#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace penstock {
namespace {

ContentDigest::Value digest_of(const std::vector<std::byte>& bytes) {
  ContentDigest digest;
  digest.add(bytes);
  return digest.value();
}

TEST(ContentDigest, EqualContentHasEqualDigests) {
  const std::vector<std::byte> bytes(1000, std::byte{7});
  EXPECT_EQ(digest_of(bytes), digest_of(bytes));
}

TEST(ContentDigest, AnyBitThatDiffersIsSeen) {
  for (const size_t size : {1, 7, 8, 9, 31, 32, 33, 40, 100}) {
    std::vector<std::byte> bytes(size);
    std::set<ContentDigest::Value> seen = {digest_of(bytes)};
    for (size_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      EXPECT_TRUE(seen.insert(digest_of(bytes)).second) << "bit " << bit << " of " << size << " bytes";
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    }
  }
}

TEST(ContentDigest, SizesOfZerosAreToldApart) {
  std::set<ContentDigest::Value> seen;
  for (size_t size = 0; size < 200; ++size)
    EXPECT_TRUE(seen.insert(digest_of(std::vector<std::byte>(size))).second) << size;
}

TEST(ContentDigest, BytesDoNotRunTogetherWithTheirNeighbours) {
  const std::vector<std::byte> bytes(48, std::byte{1});
  std::set<ContentDigest::Value> seen;
  for (size_t first = 0; first <= bytes.size(); ++first) {
    ContentDigest digest;
    digest.add(std::span(bytes).first(first));
    digest.add(std::span(bytes).subspan(first));
    EXPECT_TRUE(seen.insert(digest.value()).second) << first;
  }
}

TEST(ContentDigest, WordsThatChangePlacesAreSeen) {
  std::set<ContentDigest::Value> seen;
  for (uint64_t first = 0; first < 12; ++first) {
    ContentDigest digest;
    for (uint64_t place = 0; place < 12; ++place) digest.add(place == first ? 1 : 0);
    EXPECT_TRUE(seen.insert(digest.value()).second) << first;
  }
}

}  // namespace
}  // namespace penstock
