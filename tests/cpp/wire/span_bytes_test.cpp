// SPDX-License-Identifier: Apache-2.0
// span_bytes() against the same sum in 128 bits.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <vector>

#include "../base/seeded_test.h"
#include "wire/frame.h"

namespace penstock::wire {
namespace {

__extension__ using Wide = unsigned __int128;

// The result that span_bytes() must give; nothing where it must refuse.
std::optional<uint64_t> wide_span_bytes(DTypeCode dtype, std::span<const int64_t> shape,
                                        std::span<const int64_t> strides) {
  constexpr Wide kFarTooMuch = Wide{1} << 120;
  bool is_empty = false;
  Wide element_count = 1;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    if (shape[dim] < 0 || strides[dim] < 0) return std::nullopt;
    is_empty = is_empty || shape[dim] == 0;
    element_count *= static_cast<Wide>(shape[dim]);
    if (element_count > static_cast<Wide>(std::numeric_limits<int64_t>::max())) return std::nullopt;
  }
  if (dtype_bytes(dtype) == 0) return std::nullopt;
  if (is_empty) return 0;
  Wide last = 0;
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    last += static_cast<Wide>(shape[dim] - 1) * static_cast<Wide>(strides[dim]);
    if (last > kFarTooMuch) return std::nullopt;
  }
  const Wide bytes = (last + 1) * dtype_bytes(dtype);
  if (bytes > kPayloadBytesMax) return std::nullopt;
  return static_cast<uint64_t>(bytes);
}

class SpanBytes : public test::SeededTest {
 protected:
  // Small numbers, numbers around powers of two, and the ends of the range.
  int64_t draw_number() {
    switch (draw(0, 9)) {
      case 0: return std::numeric_limits<int64_t>::max() - draw<int64_t>(0, 2);
      case 1: return (int64_t{1} << draw(0, 62)) + draw<int64_t>(-1, 1);
      case 2: return draw<int64_t>(0, 1) == 0 ? 0 : -draw<int64_t>(1, 3);
      default: return draw<int64_t>(1, 40);
    }
  }

  static void expect_as_in_128_bits(DTypeCode dtype, const std::vector<int64_t>& shape,
                                    const std::vector<int64_t>& strides) {
    const auto expected = wide_span_bytes(dtype, shape, strides);
    const auto given = span_bytes(dtype, shape, strides);
    ASSERT_EQ(static_cast<bool>(given), expected.has_value())
        << "dtype " << int{dtype} << testing::PrintToString(shape) << testing::PrintToString(strides);
    if (expected) {
      ASSERT_EQ(given.value(), *expected) << testing::PrintToString(shape) << testing::PrintToString(strides);
    }
  }
};

TEST_F(SpanBytes, RandomShapesAndStridesAreAsIn128Bits) {
  for (int round = 0; round < 100'000; ++round) {
    const auto dim_count = draw<size_t>(0, 5);
    std::vector<int64_t> shape(dim_count);
    std::vector<int64_t> strides(dim_count);
    for (size_t dim = 0; dim < dim_count; ++dim) {
      shape[dim] = draw_number();
      strides[dim] = draw_number();
    }
    expect_as_in_128_bits(static_cast<DTypeCode>(draw(0, 30)), shape, strides);
    if (HasFatalFailure()) return;
  }
}

TEST_F(SpanBytes, TheLargestTensorPassesAndOneElementMoreIsTooLarge) {
  for (const DTypeCode dtype : {0, 2, 6, 7, 10}) {
    const auto count = static_cast<int64_t>(kPayloadBytesMax / dtype_bytes(dtype));
    EXPECT_EQ(span_bytes(dtype, std::vector<int64_t>{count}, std::vector<int64_t>{1}).value(), kPayloadBytesMax);
    EXPECT_EQ(span_bytes(dtype, std::vector<int64_t>{count + 1}, std::vector<int64_t>{1}).error().code,
              Errc::kTooLarge);
  }
}

TEST_F(SpanBytes, ExtentsThatOverflow64BitsAreRefused) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  expect_as_in_128_bits(0, {kMost, kMost}, {kMost, kMost});
  expect_as_in_128_bits(0, {kMost, kMost, 2}, {2, 1, 2});
  expect_as_in_128_bits(0, {(int64_t{1} << 32) + 1}, {int64_t{1} << 32});
  expect_as_in_128_bits(0, {3, 3}, {int64_t{1} << 62, int64_t{1} << 62});
}

TEST_F(SpanBytes, AnEmptyTensorNeedsNothingWhateverItsOtherSizes) {
  EXPECT_EQ(span_bytes(6, std::vector<int64_t>{0, 1 << 30, 1 << 30}, std::vector<int64_t>{1, 1, 1}).value(), 0u);
}

TEST_F(SpanBytes, MoreElementsThan64BitsCountAreRefusedThoughTheyShareOnePlace) {
  expect_as_in_128_bits(0, {int64_t{1} << 32, int64_t{1} << 31}, {0, 0});
  expect_as_in_128_bits(0, {(int64_t{1} << 32) - 1, int64_t{1} << 31}, {0, 0});
  EXPECT_FALSE(span_bytes(0, std::vector<int64_t>{int64_t{1} << 32, int64_t{1} << 31}, std::vector<int64_t>{0, 0}));
}

TEST_F(SpanBytes, ShapeAndStridesOfDifferentLengthAreMalformed) {
  EXPECT_EQ(span_bytes(6, std::vector<int64_t>{1, 2}, std::vector<int64_t>{1}).error().code, Errc::kMalformed);
}

}  // namespace
}  // namespace penstock::wire
