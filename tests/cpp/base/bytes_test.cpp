// SPDX-License-Identifier: Apache-2.0
#include "base/bytes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace penstock {
namespace {

enum class Colour : uint16_t { kRed = 0x1234 };

// A record with every kind of field, as a format would have it.
void write_record(ByteWriter& writer) {
  writer.write<uint8_t>(0xab);
  writer.write<int16_t>(-2);
  writer.write(Colour::kRed);
  writer.write<uint32_t>(0xdeadbeef);
  writer.write<int64_t>(std::numeric_limits<int64_t>::min());
  writer.write<double>(-0.0);
  writer.write<float>(std::numeric_limits<float>::quiet_NaN());
  writer.write_text("slab");
  writer.write_bytes(std::array{std::byte{1}, std::byte{0}});
}

struct Record {
  uint8_t small;
  int16_t negative;
  Colour colour;
  uint32_t word;
  int64_t least;
  double zero;
  float nan;
  std::string text;
  std::vector<std::byte> tail;
};

Record read_record(ByteReader& reader) {
  Record record{};
  record.small = reader.read<uint8_t>();
  record.negative = reader.read<int16_t>();
  record.colour = reader.read<Colour>();
  record.word = reader.read<uint32_t>();
  record.least = reader.read<int64_t>();
  record.zero = reader.read<double>();
  record.nan = reader.read<float>();
  record.text = reader.take_text(4);
  const auto tail = reader.take(2);
  record.tail.assign(tail.begin(), tail.end());
  return record;
}

TEST(Bytes, ARecordReadsBackAsItWasWritten) {
  ByteWriter writer;
  write_record(writer);
  ByteReader reader(writer.bytes());
  const Record record = read_record(reader);
  EXPECT_TRUE(reader.ok());
  EXPECT_EQ(reader.remaining(), 0u);
  EXPECT_EQ(reader.position(), writer.size());
  EXPECT_EQ(record.small, 0xab);
  EXPECT_EQ(record.negative, -2);
  EXPECT_EQ(record.colour, Colour::kRed);
  EXPECT_EQ(record.word, 0xdeadbeef);
  EXPECT_EQ(record.least, std::numeric_limits<int64_t>::min());
  EXPECT_TRUE(std::signbit(record.zero));
  EXPECT_TRUE(std::isnan(record.nan));
  EXPECT_EQ(record.text, "slab");
  EXPECT_EQ(record.tail, (std::vector{std::byte{1}, std::byte{0}}));
}

TEST(Bytes, NumbersLieLittleEndianAndUnpadded) {
  ByteWriter writer;
  writer.write<uint8_t>(1);
  writer.write<uint32_t>(0x01020304);
  EXPECT_EQ(writer.take(), (std::vector{std::byte{1}, std::byte{4}, std::byte{3}, std::byte{2}, std::byte{1}}));
}

// The reader's span is a copy of exactly that many bytes, so that a sanitizer sees a read past it.
TEST(Bytes, EveryTruncationFailsTheReader) {
  ByteWriter writer;
  write_record(writer);
  for (size_t size = 0; size < writer.size(); ++size) {
    const std::vector<std::byte> truncated(writer.bytes().begin(), writer.bytes().begin() + static_cast<long>(size));
    ByteReader reader(truncated);
    read_record(reader);
    EXPECT_FALSE(reader.ok()) << size << " bytes";
    EXPECT_EQ(reader.remaining(), 0u);
    EXPECT_LE(reader.position(), size);
  }
}

TEST(Bytes, AFailedReaderStaysFailedAndReadsZeros) {
  const std::vector<std::byte> bytes(3, std::byte{0xff});
  ByteReader reader(bytes);
  EXPECT_EQ(reader.read<uint32_t>(), 0u);
  EXPECT_FALSE(reader.ok());
  EXPECT_EQ(reader.read<uint8_t>(), 0u) << "three bytes are there, but the record is already wrong";
  EXPECT_TRUE(reader.take(0).empty());
  EXPECT_EQ(reader.take_text(1), "");
  EXPECT_FALSE(reader.ok());
}

TEST(Bytes, AHugeCountFailsInsteadOfWrappingAround) {
  const std::vector<std::byte> bytes(8);
  ByteReader reader(bytes);
  reader.read<uint32_t>();
  EXPECT_TRUE(reader.take(std::numeric_limits<size_t>::max()).empty());
  EXPECT_FALSE(reader.ok());
}

TEST(Bytes, NothingCanBeTakenFromNothing) {
  ByteReader reader({});
  EXPECT_TRUE(reader.take(0).empty());
  EXPECT_TRUE(reader.ok());
  EXPECT_EQ(reader.take_text(0), "");
  EXPECT_TRUE(reader.ok());
}

TEST(AlignUp, IsTheLeastMultipleThatIsNotLess) {
  for (const uint64_t alignment : {1, 2, 8, 64, 4096}) {
    for (uint64_t value = 0; value <= 3 * alignment; ++value) {
      uint64_t expected = value;
      while (expected % alignment != 0) ++expected;
      ASSERT_EQ(align_up(value, alignment), expected) << value << " to " << alignment;
    }
  }
}

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

using Secret = WipedArray<32>;

TEST(WipedArray, LeavesNoByteWhereItWas) {
  alignas(Secret) std::array<std::byte, sizeof(Secret)> memory{};
  auto* const secret = std::construct_at(reinterpret_cast<Secret*>(memory.data()));
  secret->fill(std::byte{7});
  const Secret copy = *secret;
  std::destroy_at(secret);
  std::array<std::byte, sizeof(Secret)> left{};
  std::memcpy(left.data(), memory.data(), left.size());
  EXPECT_EQ(std::count(left.begin(), left.end(), std::byte{0}), 32);
  EXPECT_EQ(std::count(copy.begin(), copy.end(), std::byte{7}), 32);
}

}  // namespace
}  // namespace penstock
