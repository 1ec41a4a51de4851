// SPDX-License-Identifier: Apache-2.0
#include "wire/narrow.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "../base/seeded_test.h"
#include "narrow_samples.h"
#include "widen_grid.h"

namespace penstock::wire {
namespace {

using Bytes = std::vector<std::byte>;

constexpr DTypeCode kInt16 = 2, kInt32 = 3, kInt64 = 4, kFloat32 = 6, kBool = 11, kUInt16 = 27, kUInt32 = 28;

template <typename T>
Bytes bytes_of(const std::vector<T>& values) {
  const auto bytes = std::as_bytes(std::span(values));
  return {bytes.begin(), bytes.end()};
}

TensorEntry entry_of(DTypeCode dtype, std::vector<int64_t> shape) {
  TensorEntry entry{.dtype = dtype, .shape = std::move(shape), .strides = {}};
  int64_t stride = 1;
  entry.strides.resize(entry.shape.size());
  for (size_t dim = entry.shape.size(); dim-- > 0;) {
    entry.strides[dim] = stride;
    stride *= entry.shape[dim];
  }
  entry.bytes = plain_bytes(entry);
  return entry;
}

// Writes the tensor narrow and reads it again; how it was written, if it was.
std::optional<NarrowForm> round_trip(const TensorEntry& entry, const Bytes& bytes) {
  EXPECT_EQ(bytes.size(), entry.bytes);
  const auto form = narrowest_form(entry, bytes);
  if (!form) return std::nullopt;
  EXPECT_LT(form->bytes, bytes.size());
  Bytes narrow(form->bytes);
  write_narrow(*form, entry, bytes, narrow);
  TensorEntry written = entry;
  written.encoding = form->encoding;
  written.bytes = form->bytes;
  Bytes wide(bytes.size(), std::byte{0xee});
  const auto widened = widen(written, narrow, wide);
  EXPECT_TRUE(widened) << widened.error().message;
  EXPECT_EQ(wide, bytes);
  return form;
}

Encoding encoding_of(const std::optional<NarrowForm>& form) { return form ? form->encoding : Encoding::kPlain; }

template <typename T>
std::vector<T> count_from(T first, size_t count, T step = 1) {
  std::vector<T> values(count);
  for (size_t place = 0; place < count; ++place) values[place] = static_cast<T>(first + static_cast<T>(place) * step);
  return values;
}

TEST(NarrowTest, IntegersTakeTheWidthOfTheirRange) {
  const auto longs = [](int64_t first, int64_t range) {
    auto values = std::vector<int64_t>(1000, first);
    values[500] = first + range;
    for (size_t place = 0; place < 400; ++place) values[place] = first + static_cast<int64_t>(place) % (range + 1);
    std::mt19937_64 random(3);  // so that no row and no end repeats
    for (size_t place = 501; place < 1000; ++place)
      values[place] = first + static_cast<int64_t>(random() % static_cast<uint64_t>(range + 1));
    return bytes_of(values);
  };
  const TensorEntry entry = entry_of(kInt64, {1000});
  for (const int64_t first : {int64_t{0}, int64_t{-5}, int64_t{1} << 40, std::numeric_limits<int64_t>::min()}) {
    EXPECT_EQ(encoding_of(round_trip(entry, longs(first, 255))), Encoding::kOffset8);
    EXPECT_EQ(encoding_of(round_trip(entry, longs(first, 256))), Encoding::kOffset16);
    EXPECT_EQ(encoding_of(round_trip(entry, longs(first, 65'535))), Encoding::kOffset16);
    EXPECT_EQ(encoding_of(round_trip(entry, longs(first, 65'536))), Encoding::kOffset32);
    EXPECT_EQ(encoding_of(round_trip(entry, longs(first, 4'294'967'295))), Encoding::kOffset32);
    EXPECT_EQ(encoding_of(round_trip(entry, longs(first, 4'294'967'296))), Encoding::kPlain);
  }
}

TEST(NarrowTest, WholeRangeOfAnIntegerStaysAsItIs) {
  std::vector<int64_t> values = count_from<int64_t>(0, 1000, 7'919'000'000'000'000);
  values[0] = std::numeric_limits<int64_t>::min();
  values[1] = std::numeric_limits<int64_t>::max();
  EXPECT_FALSE(round_trip(entry_of(kInt64, {1000}), bytes_of(values)));
}

TEST(NarrowTest, SmallerIntegersAreNarrowedToo) {
  EXPECT_EQ(encoding_of(round_trip(entry_of(kInt32, {600}), bytes_of(count_from<int32_t>(-70'000, 600)))),
            Encoding::kOffset16);
  EXPECT_EQ(encoding_of(round_trip(entry_of(kUInt32, {250, 3}), bytes_of(count_from<uint32_t>(4'294'960'000u, 750)))),
            Encoding::kOffset16);
  std::vector<int16_t> shorts(2000);
  for (size_t place = 0; place < shorts.size(); ++place) shorts[place] = static_cast<int16_t>(-100 + place * 31 % 251);
  EXPECT_EQ(encoding_of(round_trip(entry_of(kInt16, {2000}), bytes_of(shorts))), Encoding::kOffset8);
  std::vector<uint16_t> words(2000);
  for (size_t place = 0; place < words.size(); ++place) words[place] = static_cast<uint16_t>(65'000 + place * 31 % 251);
  EXPECT_EQ(encoding_of(round_trip(entry_of(kUInt16, {2000}), bytes_of(words))), Encoding::kOffset8);
}

TEST(NarrowTest, BoolsAreBits) {
  std::mt19937 random(5);
  for (const int64_t count : {2048, 2049, 2055, 5000}) {
    Bytes bools(static_cast<size_t>(count));
    for (std::byte& one : bools) one = static_cast<std::byte>(random() % 2);
    const auto form = round_trip(entry_of(kBool, {count}), bools);
    EXPECT_EQ(encoding_of(form), Encoding::kBits);
    EXPECT_EQ(form->bytes, static_cast<uint64_t>((count + 7) / 8));
  }
}

TEST(NarrowTest, BoolOfAnotherByteStaysAsItIs) {
  Bytes bools(4096);
  for (size_t place = 0; place < bools.size(); ++place) bools[place] = static_cast<std::byte>(place % 2);
  bools[77] = std::byte{2};  // true as well, but with other bits
  bools[4095] = std::byte{1};
  EXPECT_FALSE(round_trip(entry_of(kBool, {4096}), bools));
}

TEST(NarrowTest, RepeatedRowsAreSentOnce) {
  std::mt19937 random(9);
  std::vector<float> values(64 * 100);
  for (float& value : values) value = static_cast<float>(random());
  for (size_t row = 10; row < 64; ++row)
    std::copy_n(values.begin() + static_cast<ptrdiff_t>(row % 10 * 100), 100,
                values.begin() + static_cast<ptrdiff_t>(row * 100));
  const auto form = round_trip(entry_of(kFloat32, {64, 100}), bytes_of(values));
  EXPECT_EQ(encoding_of(form), Encoding::kRows);
  EXPECT_EQ(form->bytes, 4u + 64 * 4 + 10 * 400);
}

TEST(NarrowTest, RowsThatBeginAlikeAndDifferStayAsTheyAre) {
  std::vector<float> values(64 * 100, 1.5f);
  for (size_t row = 0; row < 64; ++row) values[row * 100 + 99] = static_cast<float>(row);
  EXPECT_FALSE(round_trip(entry_of(kFloat32, {64, 100}), bytes_of(values)));
}

TEST(NarrowTest, PaddedRowsAreLengthsAndValues) {
  std::mt19937 random(11);
  std::vector<float> values(32 * 200, -1.0f);
  uint64_t kept = 0;
  for (size_t row = 0; row < 32; ++row) {
    const size_t length = random() % 100;
    for (size_t place = 0; place < length; ++place) values[row * 200 + place] = static_cast<float>(random() % 1000);
    kept += length;
  }
  const auto form = round_trip(entry_of(kFloat32, {32, 200}), bytes_of(values));
  EXPECT_EQ(encoding_of(form), Encoding::kPadded);
  EXPECT_EQ(form->bytes, 8u + 32 * 4 + kept * 4);
  std::fill(values.begin() + 199, values.begin() + 200, 0.0f);  // the first row ends in another value
  EXPECT_FALSE(round_trip(entry_of(kFloat32, {32, 200}), bytes_of(values)));
}

TEST(NarrowTest, ZeroAndMinusZeroAreNotTheSamePadding) {
  std::vector<float> values(32 * 200, 0.0f);
  for (size_t row = 0; row < 32; ++row) values[row * 200] = static_cast<float>(row + 1);
  values[31 * 200 + 150] = -0.0f;
  EXPECT_TRUE(round_trip(entry_of(kFloat32, {32, 200}), bytes_of(values)));
}

TEST(NarrowTest, AllTheSameIsNotWrittenInFewerBytesThanMayBeRead) {
  const std::vector<int64_t> values(1 << 16, 7);
  const auto form = round_trip(entry_of(kInt64, {1 << 8, 1 << 8}), bytes_of(values));
  ASSERT_TRUE(form);
  EXPECT_GE(form->bytes * kWidenFactorMax, values.size() * 8);
}

TEST(NarrowTest, SmallTensorsFloatsAndTensorsWithHolesStayAsTheyAre) {
  EXPECT_FALSE(round_trip(entry_of(kInt64, {100}), bytes_of(count_from<int64_t>(0, 100))));
  std::vector<float> floats(1000);
  std::mt19937 random(2);
  for (float& value : floats) value = static_cast<float>(random());
  EXPECT_FALSE(round_trip(entry_of(kFloat32, {1000}), bytes_of(floats)));
  TensorEntry holes{.dtype = kInt64, .shape = {500}, .strides = {2}};
  holes.bytes = plain_bytes(holes);
  EXPECT_FALSE(round_trip(holes, Bytes(holes.bytes)));
  TensorEntry transposed{.dtype = kInt64, .shape = {50, 20}, .strides = {1, 50}};
  transposed.bytes = plain_bytes(transposed);
  EXPECT_FALSE(round_trip(transposed, Bytes(transposed.bytes)));
  EXPECT_FALSE(round_trip(entry_of(kInt64, {0, 500}), {}));
}

class NarrowFindsTest : public test::SeededTest {};

// Of 1 x 0 elements: found by the fuzzer.
TEST(NarrowTest, TensorWithoutElementsIsNeverWrittenNarrow) {
  TensorEntry entry = entry_of(kInt64, {1, 0});
  const Bytes rows(sizeof(uint32_t) * 2);  // none, and the number of one
  for (int encoding = 2; encoding <= 7; ++encoding) {
    entry.encoding = static_cast<Encoding>(encoding);
    entry.bytes = rows.size();
    const auto widened = widen(entry, rows, {});
    ASSERT_FALSE(widened) << encoding;
    EXPECT_EQ(widened.error().code, Errc::kMalformed);
  }
}

// The product of rows and their bytes is 2^64, which is 0 in 64 bits: memory behind the batch was read.
TEST(NarrowTest, MoreRowsThanThereAreBytesAreRefusedWhateverTheirProduct) {
  TensorEntry entry = entry_of(kBool, {1, int64_t{1} << 33});
  const std::vector<uint32_t> head{uint32_t{1} << 31, 7};  // so many different rows, of which the first is the 7th
  const Bytes narrow = bytes_of(head);
  entry.encoding = Encoding::kRows;
  entry.bytes = narrow.size();
  std::byte nothing{};  // is not written to
  const auto widened = widen(entry, narrow, {&nothing, uint64_t{1} << 33});
  ASSERT_FALSE(widened);
  EXPECT_EQ(widened.error().code, Errc::kMalformed);
}

TEST_F(NarrowFindsTest, EveryTensorComesBackAsItWas) {
  const std::vector<DTypeCode> dtypes{0, 1, kInt16, kInt32, kInt64, kFloat32, 7, kBool, 15, kUInt16, kUInt32, 29};
  for (int round = 0; round < 400; ++round) {
    const DTypeCode dtype = dtypes[random()() % dtypes.size()];
    std::vector<int64_t> shape;
    for (unsigned dim = 0; dim < 1 + random()() % 3; ++dim) shape.push_back(static_cast<int64_t>(1 + random()() % 40));
    shape.back() += 64;
    const TensorEntry entry = entry_of(dtype, shape);
    Bytes bytes(entry.bytes);
    const uint32_t item = dtype_bytes(dtype);
    const unsigned kinds = random()() % 4;
    for (size_t place = 0; place < bytes.size(); ++place) {
      const bool is_low = place % item == 0;
      if (kinds == 0) bytes[place] = static_cast<std::byte>(random()());
      if (kinds == 1) bytes[place] = static_cast<std::byte>(is_low ? random()() % 2 : 0);
      if (kinds == 2) bytes[place] = static_cast<std::byte>(is_low && random()() % 50 == 0 ? 1 : 0);
      if (kinds == 3 && place >= item * 80) bytes[place] = bytes[place % (item * 80)];
      if (kinds == 3 && place < item * 80) bytes[place] = static_cast<std::byte>(random()());
    }
    round_trip(entry, bytes);
  }
}

TEST_F(NarrowFindsTest, DamagedBytesAreRefusedOrFillTheTensorAndNoMore) {
  std::vector<int64_t> padded(64 * 64, 3);
  for (size_t row = 0; row < 64; ++row)
    for (size_t place = 0; place < row; ++place) padded[row * 64 + place] = static_cast<int64_t>(random()());
  std::vector<int64_t> repeated(64 * 64);
  for (size_t place = 0; place < repeated.size(); ++place)
    repeated[place] = place < 512 ? static_cast<int64_t>(random()()) : repeated[place % 512];
  for (const auto& [dtype, bytes] :
       std::vector<std::pair<DTypeCode, Bytes>>{{kInt64, bytes_of(padded)},
                                                {kInt64, bytes_of(repeated)},
                                                {kInt64, bytes_of(count_from<int64_t>(5, 4096))}}) {
    const TensorEntry entry = entry_of(dtype, {64, 64});
    const auto form = narrowest_form(entry, bytes);
    ASSERT_TRUE(form);
    Bytes narrow(form->bytes);
    write_narrow(*form, entry, bytes, narrow);
    for (int round = 0; round < 3000; ++round) {
      Bytes damaged = narrow;
      for (unsigned change = 0; change <= random()() % 3; ++change)
        damaged[random()() % std::min<size_t>(damaged.size(), 600)] = static_cast<std::byte>(random()());
      if (random()() % 4 == 0) damaged.resize(random()() % (damaged.size() + 20));
      TensorEntry claimed = entry;
      claimed.encoding = static_cast<Encoding>(2 + random()() % 6);
      if (random()() % 2 == 0) claimed.encoding = form->encoding;
      Bytes wide(entry.bytes + 64, std::byte{0x5a});
      static_cast<void>(widen(claimed, damaged, std::span(wide).first(entry.bytes)));
      EXPECT_TRUE(std::all_of(wide.end() - 64, wide.end(), [](std::byte byte) { return byte == std::byte{0x5a}; }));
    }
  }
}

// What a device does with narrow bytes, on grids of threads on the CPU, against wire::widen().

class WideningTest : public test::SeededTest {
 protected:
  // Checked, then widened by every thread of a grid.
  std::vector<std::byte> widened_on_grid(const NarrowSample& sample, const GridSize& size) {
    const Widening widening = check_narrow(sample.entry, sample.narrow).value();
    EXPECT_EQ(widening.plain_bytes(), plain_bytes(sample.entry));
    std::vector<std::byte> wide(widening.plain_bytes(), std::byte{0xee});
    widen_on_grid(widening, sample.narrow.data(), wide.data(), size, random());
    return wide;
  }
  GridSize grid_of(const NarrowSample& sample) { return grid_for(check_narrow(sample.entry, sample.narrow).value()); }
  static std::string text_of(const NarrowSample& sample) {
    std::string text = "encoding " + std::to_string(static_cast<int>(sample.entry.encoding)) + ", dtype " +
                       std::to_string(sample.entry.dtype) + ", sizes";
    for (const int64_t size : sample.entry.shape) text += " " + std::to_string(size);
    return text;
  }
};

TEST_F(WideningTest, EveryTensorIsTheOneThatTheCpuWidens) {
  for (const Encoding encoding : kNarrowEncodings) {
    for (int round = 0; round < 300; ++round) {
      const auto sample = random_narrow(encoding, 20, random());
      ASSERT_EQ(widened_on_grid(sample, grid_of(sample)), sample.widened()) << text_of(sample);
    }
  }
}

TEST_F(WideningTest, TheNumberOfThreadsChangesNothing) {
  for (const Encoding encoding : kNarrowEncodings) {
    for (int round = 0; round < 100; ++round) {
      const auto sample = random_narrow(encoding, 20, random());
      const GridSize size{.block_columns = draw(1u, 40u),
                          .block_rows = draw(1u, 5u),
                          .column_blocks = draw(1u, 5u),
                          .row_blocks = draw(1u, 5u)};
      // Elements without rows are counted by columns alone.
      const bool has_rows = encoding == Encoding::kRows || encoding == Encoding::kPadded;
      const GridSize used = has_rows ? size
                                     : GridSize{.block_columns = size.block_columns,
                                                .block_rows = 1,
                                                .column_blocks = size.column_blocks,
                                                .row_blocks = 1};
      ASSERT_EQ(widened_on_grid(sample, used), sample.widened()) << text_of(sample);
    }
  }
}

TEST_F(WideningTest, LongRowsAndManyRowsAreWidened) {
  for (const auto& shape : std::vector<std::vector<int64_t>>{{2, 5001}, {5001, 2}, {70'000, 1, 3}, {300, 300}}) {
    for (const Encoding encoding : {Encoding::kRows, Encoding::kPadded}) {
      NarrowSample sample{.entry = make_entry(6, shape), .narrow = {}};
      const auto rows =
          static_cast<uint32_t>(encoding == Encoding::kRows ? shape.front() : sample.entry.bytes / 4 / shape.back());
      const auto row_bytes = static_cast<uint32_t>(sample.entry.bytes / rows);
      if (encoding == Encoding::kRows) append(sample.narrow, uint32_t{1});
      if (encoding == Encoding::kPadded) append(sample.narrow, uint64_t{0x0102030405060708});
      uint64_t kept_bytes = encoding == Encoding::kRows ? row_bytes : 0;
      for (uint32_t row = 0; row < rows; ++row) {
        const uint32_t number = encoding == Encoding::kRows ? 0 : draw(0u, row_bytes / 4);
        append(sample.narrow, number);
        kept_bytes += number * 4;
      }
      const auto values = random_bytes(kept_bytes, random());
      sample.narrow.insert(sample.narrow.end(), values.begin(), values.end());
      sample.entry.encoding = encoding;
      sample.entry.bytes = sample.narrow.size();
      ASSERT_EQ(widened_on_grid(sample, grid_of(sample)), sample.widened()) << text_of(sample);
    }
  }
}

TEST_F(WideningTest, WhatTheCpuRefusesIsRefusedBeforeItIsCopied) {
  int refused_count = 0;
  for (const Encoding encoding : kNarrowEncodings) {
    for (int round = 0; round < 2000; ++round) {
      auto sample = random_narrow(encoding, 8, random());
      for (int change = draw(0, 2); change > 0; --change)
        sample.narrow[draw<size_t>(0, std::min<size_t>(sample.narrow.size(), 64) - 1)] =
            static_cast<std::byte>(draw(0, 3) == 0 ? random()() : draw(0, 9));
      if (draw(0, 5) == 0) sample.narrow.resize(draw<size_t>(0, sample.narrow.size() + 9));
      if (draw(0, 5) == 0) sample.entry.encoding = kNarrowEncodings[draw(0, 5)];
      if (draw(0, 9) == 0) sample.entry.dtype = random_dtype(Encoding::kRows, random());
      if (draw(0, 9) == 0) sample.entry.strides.front() += 1;
      sample.narrow.shrink_to_fit();  // so that a byte behind it is seen by the address sanitizer
      std::vector<std::byte> wide(plain_bytes(sample.entry), std::byte{0xee});
      const auto widened = widen(sample.entry, sample.narrow, wide);
      const auto checked = check_narrow(sample.entry, sample.narrow);
      ASSERT_EQ(static_cast<bool>(widened), static_cast<bool>(checked)) << text_of(sample);
      if (!widened) {
        ++refused_count;
        EXPECT_EQ(checked.error().code, widened.error().code);
        continue;
      }
      ASSERT_EQ(widened_on_grid(sample, grid_of(sample)), wide) << text_of(sample);
    }
  }
  EXPECT_GT(refused_count, 1000);
}

TEST_F(WideningTest, TensorWithoutElementsIsRefused) {
  for (const Encoding encoding : kNarrowEncodings) {
    TensorEntry entry = make_entry(4, {1, 0});
    entry.encoding = encoding;
    EXPECT_EQ(check_narrow(entry, std::vector<std::byte>(8)).error().code, Errc::kMalformed);
  }
}

// As NarrowTest.MoreRowsThanThereAreBytesAreRefusedWhateverTheirProduct.
TEST_F(WideningTest, MoreRowsThanThereAreBytesAreRefusedWhateverTheirProduct) {
  TensorEntry entry = make_entry(0, {1, int64_t{1} << 33});
  std::vector<std::byte> narrow;
  append(narrow, uint32_t{1} << 31);
  append(narrow, uint32_t{7});
  entry.encoding = Encoding::kRows;
  entry.bytes = narrow.size();
  EXPECT_EQ(check_narrow(entry, narrow).error().code, Errc::kMalformed);
}

}  // namespace
}  // namespace penstock::wire
