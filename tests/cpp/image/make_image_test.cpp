// SPDX-License-Identifier: Apache-2.0
// The oracle is libjpeg-turbo's decoding of whole files.
#include "image/make_image.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

#include <jpeglib.h>

namespace penstock::image {
namespace {

using Bytes = std::vector<uint8_t>;

std::span<const std::byte> bytes_of(const Bytes& file) { return std::as_bytes(std::span(file)); }

// How a file is written: bits of the seed choose the subsampling, a progressive mode and restart markers.
Bytes encode(int width, int height, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> pixels(static_cast<size_t>(width) * static_cast<size_t>(height) * 3);
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      for (int c = 0; c < 3; ++c) {
        const double value = 120 + 90 * std::sin(0.11 * (c + 1) * x + 0.07 * y) + static_cast<int>(random() % 40);
        pixels[(static_cast<size_t>(y) * static_cast<size_t>(width) + static_cast<size_t>(x)) * 3 +
               static_cast<size_t>(c)] = static_cast<uint8_t>(std::clamp(value, 0.0, 255.0));
      }
    }
  }
  jpeg_compress_struct info{};
  jpeg_error_mgr errors{};
  info.err = jpeg_std_error(&errors);
  jpeg_create_compress(&info);
  unsigned char* data = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&info, &data, &size);
  info.image_width = static_cast<JDIMENSION>(width);
  info.image_height = static_cast<JDIMENSION>(height);
  info.input_components = 3;
  info.in_color_space = JCS_RGB;
  jpeg_set_defaults(&info);
  jpeg_set_quality(&info, 60 + static_cast<int>(seed % 40), TRUE);
  info.comp_info[0].h_samp_factor = seed % 2 == 0 ? 2 : 1;
  info.comp_info[0].v_samp_factor = seed % 4 < 2 ? 2 : 1;
  if (seed % 8 < 4) jpeg_simple_progression(&info);
  if (seed % 3 == 0) info.restart_in_rows = 1;
  jpeg_start_compress(&info, TRUE);
  while (info.next_scanline < info.image_height) {
    JSAMPROW row = &pixels[static_cast<size_t>(info.next_scanline) * static_cast<size_t>(width) * 3];
    jpeg_write_scanlines(&info, &row, 1);
  }
  jpeg_finish_compress(&info);
  jpeg_destroy_compress(&info);
  Bytes file(data, data + size);
  std::free(data);  // NOLINT: libjpeg's own memory
  return file;
}

// R, G and B of each pixel.
Bytes decode_whole(const Bytes& file) {
  jpeg_decompress_struct info{};
  jpeg_error_mgr errors{};
  info.err = jpeg_std_error(&errors);
  jpeg_create_decompress(&info);
  jpeg_mem_src(&info, file.data(), static_cast<unsigned long>(file.size()));
  jpeg_read_header(&info, TRUE);
  info.out_color_space = JCS_RGB;
  jpeg_start_decompress(&info);
  Bytes pixels(static_cast<size_t>(info.output_width) * info.output_height * 3);
  while (info.output_scanline < info.output_height) {
    JSAMPROW row = &pixels[static_cast<size_t>(info.output_scanline) * info.output_width * 3];
    jpeg_read_scanlines(&info, &row, 1);
  }
  jpeg_destroy_decompress(&info);
  return pixels;
}

Bytes window_of(const Bytes& pixels, int width, const Window& window) {
  Bytes found;
  for (int y = window.top; y < window.top + window.height; ++y) {
    const auto* const row = pixels.data() + (static_cast<ptrdiff_t>(y) * width + window.left) * 3;
    found.insert(found.end(), row, row + static_cast<ptrdiff_t>(window.width) * 3);
  }
  return found;
}

class MakeImage : public testing::Test {
 protected:
  void SetUp() override {
    Dl_info of_library{};
    ASSERT_NE(::dladdr(::dlsym(RTLD_DEFAULT, "jpeg_std_error"), &of_library), 0);
    const auto found = JpegLibrary::find(of_library.dli_fname);
    ASSERT_TRUE(found) << found.error().message;
    maker.emplace(*found.value());
  }

  Bytes made(const Bytes& file, const ImageSpec& spec) {
    const auto result = maker->make(bytes_of(file), 0, spec);
    if (!result) return {};
    const auto [width, height] = maker->size();
    Bytes pixels(static_cast<size_t>(width) * static_cast<size_t>(height) * static_cast<size_t>(spec.channels()));
    maker->write_bytes(pixels.data());
    return pixels;
  }

  std::optional<ImageMaker> maker;
};

ImageSpec spec_of(const Window& window) {
  return {.decoded = window, .crop = {.width = window.width, .height = window.height}};
}

TEST_F(MakeImage, WindowHasThePixelsOfTheWholeImage) {
  std::mt19937 random(1);
  for (uint32_t seed = 0; seed < 120; ++seed) {
    const int width = 1 + static_cast<int>(random() % 200);
    const int height = 1 + static_cast<int>(random() % 200);
    const Bytes file = encode(width, height, seed);
    const Bytes whole = decode_whole(file);
    for (int i = 0; i < 4; ++i) {
      Window window{.left = static_cast<int>(random() % static_cast<uint32_t>(width)),
                    .top = static_cast<int>(random() % static_cast<uint32_t>(height))};
      window.width = 1 + static_cast<int>(random() % static_cast<uint32_t>(width - window.left));
      window.height = 1 + static_cast<int>(random() % static_cast<uint32_t>(height - window.top));
      ASSERT_EQ(made(file, spec_of(window)), window_of(whole, width, window))
          << "seed " << seed << ", " << width << "x" << height;
    }
  }
}

TEST_F(MakeImage, OpenedFileIsNotOpenedAgain) {
  const Bytes first = encode(60, 50, 1);
  const Bytes second = encode(40, 50, 2);
  const auto opened = maker->open(bytes_of(first));
  ASSERT_TRUE(opened);
  const ImageSpec spec = spec_of({.left = 3, .top = 4, .width = 30, .height = 20});
  const Bytes expected = made(first, spec);  // another use of the decoder, which ends the use of the number
  ASSERT_TRUE(maker->make(bytes_of(first), opened.value().number, spec));
  Bytes pixels(expected.size());
  maker->write_bytes(pixels.data());
  EXPECT_EQ(pixels, expected);
  const auto again = maker->open(bytes_of(first));
  ASSERT_TRUE(again);
  ASSERT_NE(again.value().number, opened.value().number);
  // Its header is not read a second time: the bytes given here are not looked at.
  ASSERT_TRUE(maker->make({}, again.value().number, spec));
  maker->write_bytes(pixels.data());
  EXPECT_EQ(pixels, expected);
  EXPECT_FALSE(maker->make({}, again.value().number, spec));
  ASSERT_TRUE(maker->open(bytes_of(second)));
  EXPECT_EQ(made(first, spec), expected);
}

TEST_F(MakeImage, FlipsReverseRowsAndColumns) {
  const Bytes file = encode(19, 11, 3);
  const Bytes whole = decode_whole(file);
  ImageSpec spec = spec_of({.width = 19, .height = 11});
  spec.flips_columns = spec.flips_rows = true;
  Bytes reversed;
  for (size_t pixel = whole.size() / 3; pixel > 0; --pixel)
    reversed.insert(reversed.end(), &whole[(pixel - 1) * 3], &whole[(pixel - 1) * 3] + 3);
  EXPECT_EQ(made(file, spec), reversed);
}

TEST_F(MakeImage, StepsAreAppliedInTheirOrder) {
  const Bytes file = encode(19, 11, 3);
  const Bytes whole = decode_whole(file);
  ImageSpec spec = spec_of({.width = 19, .height = 11});
  spec.steps = {Padding{.left = 2, .top = 3, .right = 4, .bottom = 5, .colour = {1, 2, 3}},
                Window{.left = 1, .top = 1, .width = 22, .height = 17}, Flip{.columns = true, .rows = false},
                Flip{.columns = false, .rows = true}};
  Bytes expected;
  for (int y = 17; y >= 1; --y) {
    for (int x = 22; x >= 1; --x) {
      const bool is_inside = x >= 2 && x < 21 && y >= 3 && y < 14;
      const uint8_t* const pixel = &whole[static_cast<size_t>(is_inside ? (y - 3) * 19 + x - 2 : 0) * 3];
      const Bytes border = {1, 2, 3};
      expected.insert(expected.end(), is_inside ? pixel : border.data(), (is_inside ? pixel : border.data()) + 3);
    }
  }
  EXPECT_EQ(made(file, spec), expected);
}

TEST_F(MakeImage, ResizeAmongTheStepsIsThatOfTheStart) {
  const Bytes file = encode(50, 41, 3);
  const Resize resize{.width = 23, .height = 60, .filter = Filter::kBicubic};
  ImageSpec first = spec_of({.width = 50, .height = 41});
  ImageSpec later = first;
  first.resize = resize;
  first.crop = {.width = 23, .height = 60};
  later.steps = {Flip{.columns = true, .rows = true}, Flip{.columns = true, .rows = true}, resize};
  EXPECT_EQ(made(file, later), made(file, first));
  const Resize back{.width = 50, .height = 41, .filter = Filter::kBox};
  later.steps.emplace_back(back);
  first.steps = {back};
  EXPECT_EQ(made(file, later), made(file, first));
}

TEST_F(MakeImage, ResizeOfAPartNeedsOnlyItsWindow) {
  const Bytes file = encode(150, 141, 3);
  using Corners = std::array<float, 4>;
  for (const Filter filter : {Filter::kBox, Filter::kBilinear, Filter::kHamming, Filter::kBicubic, Filter::kLanczos}) {
    for (const auto& box : {Corners{0, 0, 150, 141}, Corners{60.25, 50, 90, 77.5}, Corners{140, 139.5, 150, 141}}) {
      const Resize resize{.width = 23, .height = 60, .filter = filter, .box = box};
      ImageSpec windowed = spec_of({.width = 150, .height = 141});
      ImageSpec whole = windowed;  // is decoded completely, as the first resize is a later step
      windowed.resize = resize;
      windowed.crop = {.width = 23, .height = 60};
      whole.steps = {resize};
      EXPECT_EQ(made(file, windowed), made(file, whole)) << box[0];
    }
  }
}

TEST_F(MakeImage, GrayImageHasOneChannel) {
  const Bytes file = encode(9, 7, 3);
  ImageSpec spec = spec_of({.width = 9, .height = 7});
  spec.steps = {Gray{}};
  const Bytes colours = made(file, spec);
  spec.is_gray = true;
  const Bytes gray = made(file, spec);
  ASSERT_EQ(gray.size() * 3, colours.size());
  for (size_t i = 0; i < colours.size(); ++i) ASSERT_EQ(colours[i], gray[i / 3]);
}

TEST_F(MakeImage, PlanesHaveTheTablesValues) {
  std::array<float, kTableSize> tables{};
  for (size_t i = 0; i < kTableSize; ++i) tables[i] = static_cast<float>(i) * 0.5F;
  for (const int width : {1, 7, 8, 9, 40}) {
    const Bytes file = encode(width, 5, 7);
    ImageSpec spec = spec_of({.width = width, .height = 5});
    for (const bool flips : {false, true}) {
      spec.flips_columns = flips;
      const Bytes pixels = made(file, spec);
      std::vector<float> planes(pixels.size());
      maker->write_planes(tables, planes.data());
      for (size_t i = 0; i < pixels.size(); ++i)
        ASSERT_EQ(planes[(i % 3) * (pixels.size() / 3) + i / 3], tables[256 * (i % 3) + pixels[i]]);
    }
  }
}

TEST_F(MakeImage, TruncatedFilesAreLeftToPillow) {
  for (const uint32_t seed : {0U, 4U}) {  // progressive, and in one scan
    const Bytes file = encode(90, 70, seed);
    for (size_t size = 0; size + 2 <= file.size(); size += 13) {
      const Bytes part(file.begin(), file.begin() + static_cast<ptrdiff_t>(size));
      ASSERT_FALSE(maker->open(bytes_of(part))) << size << " of " << file.size();
    }
    EXPECT_TRUE(maker->open(bytes_of(file)));
  }
}

TEST_F(MakeImage, DamagedFilesDoNoHarm) {
  std::mt19937 random(5);
  for (uint32_t seed = 0; seed < 400; ++seed) {
    Bytes file = encode(60, 50, seed);
    for (int i = 0; i < 3; ++i) file[random() % file.size()] = static_cast<uint8_t>(random());
    const auto opened = maker->open(bytes_of(file));
    if (!opened || opened.value().header.size.width > 1000 || opened.value().header.size.height > 1000) continue;
    const auto [width, height] = opened.value().header.size;
    made(file, spec_of({.left = width / 3, .top = height / 3, .width = (width + 1) / 2, .height = (height + 1) / 2}));
  }
  const Bytes file = encode(60, 50, 1);  // the decoder still works
  EXPECT_EQ(made(file, spec_of({.width = 60, .height = 50})), decode_whole(file));
}

TEST(JpegLibrary, ObjectWithoutTheFunctionsIsRefused) {
  const auto missing = JpegLibrary::find("/no/such/library.so");
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error(), (Fault{Errc::kUnsupported, "/no/such/library.so cannot be opened"}));
  Dl_info of_c{};
  ASSERT_NE(::dladdr(::dlsym(RTLD_DEFAULT, "malloc"), &of_c), 0);
  const auto other = JpegLibrary::find(of_c.dli_fname);
  ASSERT_FALSE(other);
  EXPECT_EQ(other.error().code, Errc::kUnsupported);
}

}  // namespace
}  // namespace penstock::image
