// SPDX-License-Identifier: Apache-2.0
// That results are Pillow's is tested with Pillow, by tests/python/test_native_images.py.
#include "image/resample.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <random>

namespace penstock::image {
namespace {

constexpr Filter kFilters[] = {Filter::kLanczos, Filter::kBilinear, Filter::kBicubic, Filter::kBox, Filter::kHamming};

struct Image {
  Image(int width, int height) : bytes(static_cast<size_t>(width) * static_cast<size_t>(height) * 4 + kSpareBytes) {
    pixels = {.data = bytes.data(), .width = width, .height = height, .stride = static_cast<ptrdiff_t>(width) * 4};
  }

  // R, G and B alone: the fourth byte is undefined.
  std::vector<uint8_t> colours() const {
    std::vector<uint8_t> found;
    for (int y = 0; y < pixels.height; ++y) {
      for (int x = 0; x < pixels.width; ++x)
        found.insert(found.end(), pixels.row(y) + 4 * x, pixels.row(y) + 4 * x + 3);
    }
    return found;
  }

  std::vector<uint8_t> bytes;
  Pixels pixels;
};

Image noise(int width, int height, uint32_t seed) {
  Image made(width, height);
  std::mt19937 random(seed);
  // Extremes are frequent, so that sums approach their bounds.
  for (auto& byte : made.bytes) byte = static_cast<uint8_t>(random() % 3 == 0 ? 255 : random());
  return made;
}

std::vector<uint8_t> resized(const Image& input, int width, int height, Filter filter, PassOrder order, bool has_avx2) {
  Image output(width, height);
  set_avx2_for_test(has_avx2);
  Resizer().resize(input.pixels, filter, order, output.pixels);
  set_avx2_for_test(true);
  return output.colours();
}

TEST(Resample, WeightsOfAPositionSumToOne) {
  for (const Filter filter : kFilters) {
    for (const auto& [input, output] : {std::pair(7, 3), std::pair(3, 7), std::pair(500, 224), std::pair(5000, 1)}) {
      const Weights weights = make_weights(input, output, filter);
      for (size_t i = 0; i < weights.first.size(); ++i) {
        int64_t sum = 0;
        for (int tap = 0; tap < weights.taps; ++tap)
          sum += weights.weights[i * static_cast<size_t>(weights.taps) + static_cast<size_t>(tap)];
        EXPECT_LE(std::abs(sum - (1 << 22)), weights.taps) << input << " to " << output;
        EXPECT_GE(weights.first[i], 0);
        EXPECT_LE(weights.first[i] + weights.count[i], input);
      }
    }
  }
}

TEST(Resample, SameSizeIsACopy) {
  const Image input = noise(31, 17, 1);
  EXPECT_EQ(resized(input, 31, 17, Filter::kLanczos, PassOrder::kColumnsFirst, true), input.colours());
}

TEST(Resample, ConstantImageStaysConstant) {
  Image input(40, 30);
  std::fill(input.bytes.begin(), input.bytes.end(), uint8_t{201});
  for (const Filter filter : kFilters) {
    for (const uint8_t value : resized(input, 13, 57, filter, PassOrder::kByShrinkage, true)) ASSERT_EQ(value, 201);
  }
}

TEST(Resample, VectorsGiveTheBytesOfPlainCode) {
  std::mt19937 random(2);
  const auto side = [&] { return 1 + static_cast<int>(random() % 300); };
  for (uint32_t seed = 0; seed < 100; ++seed) {
    const Image input = noise(side(), side(), seed);
    const int width = side();
    const int height = side();
    const Filter filter = kFilters[seed % 5];
    const PassOrder order = seed % 2 == 0 ? PassOrder::kByShrinkage : PassOrder::kColumnsFirst;
    ASSERT_EQ(resized(input, width, height, filter, order, true), resized(input, width, height, filter, order, false))
        << input.pixels.width << "x" << input.pixels.height << " to " << width << "x" << height;
  }
}

TEST(Resample, VectorsDoNotOverflowWhenThousandsOfPixelsBecomeOne) {
  for (const Filter filter : kFilters) {
    const Image wide = noise(30000, 2, 3);
    EXPECT_EQ(resized(wide, 2, 2, filter, PassOrder::kColumnsFirst, true),
              resized(wide, 2, 2, filter, PassOrder::kColumnsFirst, false));
    const Image high = noise(9, 30000, 4);
    EXPECT_EQ(resized(high, 9, 3, filter, PassOrder::kColumnsFirst, true),
              resized(high, 9, 3, filter, PassOrder::kColumnsFirst, false));
  }
}

TEST(Resample, OrderOfThePassesShowsOnlyWhereRowsShrinkMore) {
  const auto both = [](int width, int height) {
    const Image input = noise(100, 100, 5);
    return resized(input, width, height, Filter::kBicubic, PassOrder::kColumnsFirst, true) ==
           resized(input, width, height, Filter::kBicubic, PassOrder::kByShrinkage, true);
  };
  EXPECT_TRUE(both(40, 90));
  EXPECT_TRUE(both(40, 40));
  EXPECT_FALSE(both(90, 40));
}

}  // namespace
}  // namespace penstock::image
