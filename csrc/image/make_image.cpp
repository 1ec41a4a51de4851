// SPDX-License-Identifier: Apache-2.0
#include "image/make_image.h"

#include <algorithm>
#include <atomic>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock::image {
namespace {

Fault changed() { return {Errc::kUnsupported, "the file is left to Pillow: its size has changed"}; }

Pixels part_of(const Pixels& image, const Window& window) {
  return {.data = image.pixel(window.left, window.top),
          .width = window.width,
          .height = window.height,
          .stride = image.stride};
}

void pad(const Pixels& image, const Padding& padding, const Pixels& padded) {
  const auto [r, g, b] = padding.colour;
  const std::array<uint8_t, kPixelBytes> colour = {r, g, b, 0};
  for (int y = 0; y < padded.height; ++y) {
    const bool is_inside = y >= padding.top && y < padding.top + image.height;
    const int left = is_inside ? padding.left : padded.width;  // of the image, and of its border otherwise
    const int right = is_inside ? padding.left + image.width : padded.width;
    for (int x = 0; x < left; ++x) std::copy_n(colour.data(), kPixelBytes, padded.pixel(x, y));
    for (int x = right; x < padded.width; ++x) std::copy_n(colour.data(), kPixelBytes, padded.pixel(x, y));
    if (is_inside) std::copy_n(image.row(y - padding.top), image.width * kPixelBytes, padded.pixel(left, y));
  }
}

void flip(const Pixels& image, const Flip& flip) {
  if (flip.columns) {
    for (int y = 0; y < image.height; ++y) {
      for (int left = 0, right = image.width - 1; left < right; ++left, --right)
        std::swap_ranges(image.pixel(left, y), image.pixel(left + 1, y), image.pixel(right, y));
    }
  }
  if (flip.rows) {
    for (int top = 0, bottom = image.height - 1; top < bottom; ++top, --bottom)
      std::swap_ranges(image.row(top), image.pixel(image.width, top), image.row(bottom));
  }
}

template <typename... Functions>
struct Overloaded : Functions... {
  using Functions::operator()...;
};

// Returns the end of the output.
template <int kChannels>
uint8_t* write_row_bytes(const uint8_t* pixels, int width, bool flips, uint8_t* output) {
  const ptrdiff_t step = flips ? -kPixelBytes : kPixelBytes;
  const uint8_t* pixel = flips ? pixels + static_cast<ptrdiff_t>(width - 1) * kPixelBytes : pixels;
  for (int x = 0; x < width; ++x, pixel += step, output += kChannels) {
    for (int c = 0; c < kChannels; ++c) output[c] = pixel[c];
  }
  return output;
}

void write_row_plain(const uint8_t* pixels, int begin, int width, bool flips, const float* tables,
                     float* const* planes) {
  for (int x = begin; x < width; ++x) {
    const uint8_t* const pixel = pixels + static_cast<ptrdiff_t>(flips ? width - 1 - x : x) * kPixelBytes;
    for (int c = 0; c < 3; ++c) planes[c][x] = tables[256 * c + pixel[c]];
  }
}

#if defined(__x86_64__)
[[gnu::target("avx2")]] void write_row_avx2(const uint8_t* pixels, int width, bool flips, const float* tables,
                                            float* const* planes) {
  const __m256i byte = _mm256_set1_epi32(0xff);
  const __m256i reversed = _mm256_setr_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  int x = 0;
  for (; x + 8 <= width; x += 8) {
    const uint8_t* const from = pixels + static_cast<ptrdiff_t>(flips ? width - 8 - x : x) * kPixelBytes;
    __m256i eight = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if (flips) eight = _mm256_permutevar8x32_epi32(eight, reversed);
    const __m256i r = _mm256_and_si256(eight, byte);
    const __m256i g = _mm256_and_si256(_mm256_srli_epi32(eight, 8), byte);
    const __m256i b = _mm256_and_si256(_mm256_srli_epi32(eight, 16), byte);
    _mm256_storeu_ps(planes[0] + x, _mm256_i32gather_ps(tables, r, 4));
    _mm256_storeu_ps(planes[1] + x, _mm256_i32gather_ps(tables + 256, g, 4));
    _mm256_storeu_ps(planes[2] + x, _mm256_i32gather_ps(tables + 512, b, 4));
  }
  write_row_plain(pixels, x, width, flips, tables, planes);
}
#else
void write_row_avx2(const uint8_t* pixels, int width, bool flips, const float* tables, float* const* planes) {
  write_row_plain(pixels, 0, width, flips, tables, planes);
}
#endif

}  // namespace

Side Resize::columns(int image_width) const {
  return {.size = image_width, .begin = box ? (*box)[0] : 0, .end = box ? (*box)[2] : static_cast<float>(image_width)};
}

Side Resize::rows(int image_height) const {
  return {
      .size = image_height, .begin = box ? (*box)[1] : 0, .end = box ? (*box)[3] : static_cast<float>(image_height)};
}

Result<ImageMaker::Opened> ImageMaker::open(std::span<const std::byte> file) {
  opened_.number = 0;
  const auto header = decoder_of(file).open(file);
  if (!header) return header.error();
  static std::atomic<int64_t> newest{0};
  opened_ = {.header = header.value(), .number = ++newest};
  return opened_;
}

Decoder& ImageMaker::decoder_of(std::span<const std::byte> file) { return is_png(file) ? png_ : *jpeg_; }

Result<ImageSize> ImageMaker::reopen(std::span<const std::byte> file, int64_t number) {
  if (number == 0 || number != opened_.number) {
    if (auto opened = open(file); !opened) return opened.error();
  }
  opened_.number = 0;
  return opened_.header.size;
}

Result<void> ImageMaker::make(std::span<const std::byte> file, int64_t number, const ImageSpec& spec) {
  const auto size = reopen(file, number);
  if (!size) return size.error();
  if (!is_within(spec.decoded, size.value().width, size.value().height)) return changed();
  Window window = spec.decoded;
  Side columns;
  Side rows;
  if (spec.resize) {
    columns = spec.resize->columns(window.width);
    rows = spec.resize->rows(window.height);
    const Reach of_columns = reach_of(columns, spec.resize->width, spec.resize->filter);
    const Reach of_rows = reach_of(rows, spec.resize->height, spec.resize->filter);
    columns.offset = of_columns.begin;
    rows.offset = of_rows.begin;
    window = {.left = window.left + of_columns.begin,
              .top = window.top + of_rows.begin,
              .width = of_columns.end - of_columns.begin,
              .height = of_rows.end - of_rows.begin};
  }
  auto decoded = decoder_of(file).decode(window);
  if (!decoded) return decoded.error();
  made_ = decoded.value();
  if (spec.resize) resize(*spec.resize, columns, rows);
  apply(spec.crop);
  for (const Step& step : spec.steps) apply(step);
  flips_columns_ = spec.flips_columns;
  flips_rows_ = spec.flips_rows;
  is_gray_ = spec.is_gray;
  return {};
}

void ImageMaker::resize(const Resize& resize, const Side& columns, const Side& rows) {
  const Pixels resized = make_room(resize.width, resize.height);
  resizer_.resize(made_, columns, rows, resize.filter, resize.order, resized);
  made_ = resized;
}

Pixels ImageMaker::make_room(int width, int height) {
  newest_room_ = 1 - newest_room_;
  const ptrdiff_t stride = static_cast<ptrdiff_t>(width) * kPixelBytes;
  auto& room = rooms_[newest_room_];
  room.resize(static_cast<size_t>(stride) * static_cast<size_t>(height) + kSpareBytes);
  return {.data = room.data(), .width = width, .height = height, .stride = stride};
}

void ImageMaker::apply(const Step& step) {
  std::visit(Overloaded{
                 [&](const Blend& one) { blend(made_, one.base, one.factor); },
                 [&](const Gray&) { make_gray(made_); },
                 [&](const HueShift& one) { shift_hue(made_, one.shift); },
                 [&](const Table& one) { look_up(made_, one.bytes); },
                 [&](const Window& crop) {
                   PENSTOCK_ASSERT(is_within(crop, made_.width, made_.height), "the crop is not within the image");
                   made_ = part_of(made_, crop);
                 },
                 [&](const Padding& one) {
                   const Pixels padded =
                       make_room(one.left + made_.width + one.right, one.top + made_.height + one.bottom);
                   pad(made_, one, padded);
                   made_ = padded;
                 },
                 [&](const Resize& one) { resize(one, one.columns(made_.width), one.rows(made_.height)); },
                 [&](const Flip& one) { flip(made_, one); },
             },
             step);
}

void ImageMaker::write_bytes(uint8_t* output) const {
  for (int y = 0; y < made_.height; ++y) {
    const uint8_t* const row = made_.row(flips_rows_ ? made_.height - 1 - y : y);
    output = is_gray_ ? write_row_bytes<1>(row, made_.width, flips_columns_, output)
                      : write_row_bytes<3>(row, made_.width, flips_columns_, output);
  }
}

void ImageMaker::write_planes(std::span<const float, kTableSize> tables, float* output) const {
  const ptrdiff_t plane = static_cast<ptrdiff_t>(made_.width) * made_.height;
  const bool has_avx2 = uses_avx2();
  for (int y = 0; y < made_.height; ++y) {
    const uint8_t* const row = made_.row(flips_rows_ ? made_.height - 1 - y : y);
    float* const first = output + static_cast<ptrdiff_t>(y) * made_.width;
    float* const planes[3] = {first, first + plane, first + 2 * plane};
    if (has_avx2) {
      write_row_avx2(row, made_.width, flips_columns_, tables.data(), planes);
    } else {
      write_row_plain(row, 0, made_.width, flips_columns_, tables.data(), planes);
    }
  }
}

}  // namespace penstock::image
