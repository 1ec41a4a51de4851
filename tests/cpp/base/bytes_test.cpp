// SPDX-License-Identifier: Apache-2.0
#include "base/bytes.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
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

}  // namespace
}  // namespace penstock
