// SPDX-License-Identifier: Apache-2.0
#include "base/copy_digest.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <span>
#include <vector>

namespace penstock {
namespace {

using Bytes = std::vector<std::byte>;

CopyDigest::Value copy_digest_of(std::span<const std::byte> bytes) {
  CopyDigest digest;
  digest.add(bytes);
  return digest.value();
}

Bytes random_bytes(size_t size, uint64_t seed = 1) {
  std::mt19937_64 draws(seed);
  Bytes bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(draws());
  return bytes;
}

// One part as the header describes it, word by word.
CopyDigest::Value plain_digest(const Bytes& bytes) {
  std::array<uint64_t, 24> keys{};
  uint64_t state = 0;
  for (uint64_t& key : keys) {
    state += 0x9e3779b97f4a7c15;
    key = (state ^ state >> 30) * 0xbf58476d1ce4e5b9;
    key = (key ^ key >> 27) * 0x94d049bb133111eb;
    key ^= key >> 31;
  }
  std::array<uint64_t, 8> lanes = {0x243f6a8885a308d3, 0x13198a2e03707344, 0xa4093822299f31d0, 0x082efa98ec4e6c89,
                                   0x452821e638d01377, 0xbe5466cf34e90c6c, 0xc0ac29b7c97c50dd, 0x3f84d5b5b5470917};
  const auto mix = [&] {
    for (size_t lane = 0; lane < 8; ++lane)
      lanes[lane] = (lanes[lane] ^ lanes[lane] >> 47 ^ keys[16 + lane]) * 0x9e3779b1;
  };
  Bytes padded = bytes;
  padded.resize((bytes.size() + 63) / 64 * 64);
  for (size_t stripe = 0; stripe < padded.size() / 64; ++stripe) {
    std::array<uint64_t, 8> words{};
    std::memcpy(words.data(), padded.data() + 64 * stripe, 64);
    for (size_t lane = 0; lane < 8; ++lane) {
      const uint64_t keyed = words[lane] ^ keys[stripe % 16 + lane];
      lanes[lane] += uint64_t{static_cast<uint32_t>(keyed)} * (keyed >> 32);
      lanes[lane ^ 1] += words[lane];
    }
    if (stripe % 16 == 15 && 64 * (stripe + 1) <= bytes.size()) mix();
  }
  for (uint64_t& lane : lanes) lane += bytes.size();
  mix();
  CopyDigest::Value value{};
  for (size_t lane = 0; lane < 4; ++lane)
    value[lane] = (lanes[lane] ^ lanes[lane] >> 32) * 0x9e3779b97f4a7c15 + lanes[lane + 4];
  return value;
}

TEST(CopyDigest, EqualsItsDescriptionOnEachProcessor) {
  for (const size_t size : {0, 1, 8, 63, 64, 65, 1000, 1023, 1024, 1025, 2048, 5000, 100'003})
    EXPECT_EQ(copy_digest_of(random_bytes(size)), plain_digest(random_bytes(size))) << size;
}

TEST(CopyDigest, CopiesAndHasTheDigestOfTheCopy) {
  for (const size_t size : {0, 1, 63, 64, 65, 1024, 5000}) {
    for (const size_t misalignment : {0, 1, 8}) {
      const Bytes source = random_bytes(size + misalignment);
      const auto bytes = std::span(source).subspan(misalignment);
      Bytes copy(size + 2 * 64, std::byte{7});
      CopyDigest digest;
      digest.copy(bytes, copy.data() + 64 - misalignment);
      EXPECT_EQ(digest.value(), copy_digest_of(bytes));
      const Bytes surrounded(copy.begin() + 64 - misalignment, copy.begin() + 64 - misalignment + size);
      EXPECT_EQ(surrounded, Bytes(bytes.begin(), bytes.end()));
      EXPECT_EQ(copy[63 - misalignment], std::byte{7});
      EXPECT_EQ(copy[64 - misalignment + size], std::byte{7});
    }
  }
}

TEST(CopyDigest, AnyBitThatDiffersIsSeen) {
  for (const size_t size : {1, 7, 8, 9, 63, 64, 65, 1024, 1100}) {
    for (Bytes bytes : {Bytes(size), Bytes(size, std::byte{0xff}), random_bytes(size)}) {
      std::set<CopyDigest::Value> seen = {copy_digest_of(bytes)};
      for (size_t bit = 0; bit < 8 * size; ++bit) {
        bytes[bit / 8] ^= std::byte{1} << (bit % 8);
        EXPECT_TRUE(seen.insert(copy_digest_of(bytes)).second) << "bit " << bit << " of " << size << " bytes";
        bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      }
    }
  }
}

TEST(CopyDigest, PairsOfBitsThatDifferAreSeen) {
  Bytes bytes = random_bytes(2048);
  const auto expected = copy_digest_of(bytes);
  std::mt19937_64 draws(3);
  for (int round = 0; round < 20'000; ++round) {
    const size_t one = draws() % (8 * bytes.size());
    const size_t other = (one + 1 + draws() % (8 * bytes.size() - 1)) % (8 * bytes.size());
    for (const size_t bit : {one, other}) bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_NE(copy_digest_of(bytes), expected) << one << " and " << other;
    for (const size_t bit : {one, other}) bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
}

TEST(CopyDigest, PartsThatChangePlacesAreSeen) {
  for (const size_t size : {8, 16, 64, 1024, 4096}) {
    Bytes bytes = random_bytes(3 * size);
    const auto expected = copy_digest_of(bytes);
    std::swap_ranges(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(size),
                     bytes.end() - static_cast<ptrdiff_t>(size));
    EXPECT_NE(copy_digest_of(bytes), expected) << size;
  }
}

TEST(CopyDigest, SizesOfZerosAreToldApart) {
  std::set<CopyDigest::Value> seen;
  for (size_t size = 0; size < 3000; ++size) EXPECT_TRUE(seen.insert(copy_digest_of(Bytes(size))).second) << size;
}

TEST(CopyDigest, BytesDoNotRunTogetherWithTheirNeighbours) {
  const Bytes bytes(150, std::byte{1});
  std::set<CopyDigest::Value> seen;
  for (size_t first = 0; first <= bytes.size(); ++first) {
    CopyDigest digest;
    digest.add(std::span(bytes).first(first));
    digest.add(std::span(bytes).subspan(first));
    EXPECT_TRUE(seen.insert(digest.value()).second) << first;
  }
}

}  // namespace
}  // namespace penstock
