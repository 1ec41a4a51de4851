// SPDX-License-Identifier: Apache-2.0
// What a device does with narrow bytes, on grids of threads on the CPU, against wire::widen().
#include "wire/widening.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../base/seeded_test.h"
#include "narrow_samples.h"
#include "widen_grid.h"

namespace penstock::wire {
namespace {

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
