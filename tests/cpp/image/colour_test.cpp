// SPDX-License-Identifier: Apache-2.0
// That results are Pillow's is tested with Pillow, by tests/python/test_native_images.py.
#include "image/colour.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace penstock::image {
namespace {

struct Picture {
  Picture(int width, int height) : bytes(static_cast<size_t>(width) * static_cast<size_t>(height) * 4 + kSpareBytes) {
    pixels = {.data = bytes.data(), .width = width, .height = height, .stride = static_cast<ptrdiff_t>(width) * 4};
  }
  Picture(const Picture&) = delete;
  Picture& operator=(const Picture&) = delete;

  // R, G and B alone: the fourth byte is undefined.
  std::vector<uint8_t> colours() const {
    std::vector<uint8_t> found;
    for (int y = 0; y < pixels.height; ++y) {
      for (int x = 0; x < pixels.width; ++x) found.insert(found.end(), pixels.pixel(x, y), pixels.pixel(x, y) + 3);
    }
    return found;
  }

  std::vector<uint8_t> bytes;
  Pixels pixels;
};

void fill(const Picture& picture, uint32_t seed) {
  std::mt19937 random(seed);
  std::generate_n(picture.pixels.data, picture.bytes.size(), [&] { return static_cast<uint8_t>(random()); });
}

template <typename Operation>
std::vector<uint8_t> result_of(int width, int height, bool has_avx2, Operation operation) {
  Picture picture(width, height);
  fill(picture, static_cast<uint32_t>(width * 1000 + height));
  set_avx2_for_test(has_avx2);
  operation(picture.pixels);
  set_avx2_for_test(true);
  return picture.colours();
}

TEST(Colour, VectorsAndPlainCodeAreEqual) {
  const auto expect_equal = [](auto operation) {
    for (const auto& [width, height] : {std::pair(1, 1), std::pair(7, 3), std::pair(8, 8), std::pair(131, 57)})
      EXPECT_EQ(result_of(width, height, true, operation), result_of(width, height, false, operation)) << width;
  };
  for (const BlendBase base : {BlendBase::kBlack, BlendBase::kMean, BlendBase::kGray}) {
    for (const float factor : {0.0F, 1.0F, 0.37F, 1.9F, -0.6F, 300.0F, -kBlendFactorMax, kBlendFactorMax})
      expect_equal([&](const Pixels& pixels) { blend(pixels, base, factor); });
  }
  expect_equal([](const Pixels& pixels) { make_gray(pixels); });
  for (const int shift : {0, 1, 100, 255})
    expect_equal([&](const Pixels& pixels) { shift_hue(pixels, static_cast<uint8_t>(shift)); });
}

TEST(Colour, WindowAloneIsChanged) {
  Picture picture(40, 30);
  fill(picture, 3);
  const std::vector<uint8_t> before = picture.bytes;
  const Pixels window{.data = picture.pixels.pixel(5, 6), .width = 19, .height = 11, .stride = picture.pixels.stride};
  std::array<uint8_t, ByteTables::extent> inverted{};
  for (size_t i = 0; i < inverted.size(); ++i) inverted[i] = static_cast<uint8_t>(~i);
  blend(window, BlendBase::kMean, 1.5F);
  shift_hue(window, 30);
  look_up(window, inverted);
  blend(window, BlendBase::kGray, 0.5F);
  make_gray(window);
  for (int y = 0; y < 30; ++y) {
    for (int x = 0; x < 40; ++x) {
      const bool is_inside = x >= 5 && x < 24 && y >= 6 && y < 17;
      const uint8_t* const pixel = picture.pixels.pixel(x, y);
      if (is_inside) {
        EXPECT_TRUE(pixel[0] == pixel[1] && pixel[1] == pixel[2]) << x << ", " << y;
      } else {
        EXPECT_TRUE(std::equal(pixel, pixel + 4, before.data() + (pixel - picture.bytes.data()))) << x << ", " << y;
      }
    }
  }
}

TEST(Colour, BlendsWithFactorsOf0And1AreTheirEnds) {
  const auto original = result_of(21, 9, true, [](const Pixels&) {});
  for (const BlendBase base : {BlendBase::kBlack, BlendBase::kMean, BlendBase::kGray})
    EXPECT_EQ(result_of(21, 9, true, [&](const Pixels& pixels) { blend(pixels, base, 1); }), original);
  EXPECT_EQ(result_of(21, 9, true, [](const Pixels& pixels) { blend(pixels, BlendBase::kBlack, 0); }),
            std::vector<uint8_t>(original.size()));
  EXPECT_EQ(result_of(21, 9, true, [](const Pixels& pixels) { blend(pixels, BlendBase::kGray, 0); }),
            result_of(21, 9, true, [](const Pixels& pixels) { make_gray(pixels); }));
}

TEST(Colour, HueOfPrimaryColoursIsShiftedByAThird) {
  Picture picture(3, 1);
  const std::vector<uint8_t> primaries = {255, 0, 0, 0, 0, 255, 0, 0, 0, 0, 255, 0};
  std::copy(primaries.begin(), primaries.end(), picture.pixels.data);
  shift_hue(picture.pixels, 85);
  EXPECT_EQ(picture.colours(), (std::vector<uint8_t>{0, 255, 0, 0, 0, 255, 255, 0, 0}));
}

}  // namespace
}  // namespace penstock::image
