// SPDX-License-Identifier: Apache-2.0
#include "image/colour.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <memory>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock::image {
namespace {

int gray_of(const uint8_t* pixel) { return (pixel[0] * 19595 + pixel[1] * 38470 + pixel[2] * 7471 + 0x8000) >> 16; }

uint8_t blended(int base, int value, float factor) {
  const float product = factor * static_cast<float>(value - base);
  return static_cast<uint8_t>(std::clamp(static_cast<int>(static_cast<float>(base) + product), 0, 255));
}

// The hue circle has six parts: which of R, G and B is the largest, and which is the smallest.
constexpr int kSixths = 6;
constexpr size_t kSixthSize = size_t{256} * 256;

// The hues of all colours, which depend on the sixth, the chroma (largest - smallest) and the distance (largest -
// middle): Pillow's formula needs a division in double precision.
using Hues = std::array<uint8_t, kSixths * kSixthSize + kSpareBytes>;  // [sixth][chroma][distance]

// Hue as a byte for an angle in sixths of the circle, from -1.
uint8_t hue_of(float angle) {
  const auto turn = static_cast<float>(std::fmod(angle / 6.0 + 1.0, 1.0));
  return static_cast<uint8_t>(std::clamp(static_cast<int>(turn * 255.0), 0, 255));
}

const Hues& all_hues() {
  static const Hues& hues = *[] {
    auto made = std::make_unique<Hues>();
    for (int chroma = 1; chroma < 256; ++chroma) {
      for (int distance = 0; distance <= chroma; ++distance) {
        const float q = static_cast<float>(distance) / static_cast<float>(chroma);
        const float angles[kSixths] = {1.0F - q, q - 1.0F, 1.0F + q, 3.0F - q, 3.0F + q, 5.0F - q};
        for (size_t sixth = 0; sixth < kSixths; ++sixth)
          (*made)[sixth * kSixthSize + static_cast<size_t>(chroma * 256 + distance)] = hue_of(angles[sixth]);
      }
    }
    return made.release();  // for all threads' exits
  }();
  return hues;
}

// Where R, G and B are from in each sixth: 0 for the largest value, 1 for the middle one and 2 for the smallest. A hue
// of 255 is in a seventh, equal to the first one. The rest is for AVX2: a fourth byte that gives 0 in a shuffle, and an
// eighth number.
constexpr uint32_t kOrders[8] = {0x80020100, 0x80020001, 0x80010002, 0x80000102,
                                 0x80000201, 0x80010200, 0x80020100, 0x80020100};

uint8_t rounded(double value) { return static_cast<uint8_t>(value + 0.5); }  // of 0 or more

void shift_row_plain(const Hues& hues, uint8_t* pixel, int count, uint8_t shift) {
  for (int x = 0; x < count; ++x, pixel += kPixelBytes) {
    const int r = pixel[0];
    const int g = pixel[1];
    const int b = pixel[2];
    const int largest = std::max({r, g, b});
    const int smallest = std::min({r, g, b});
    const int chroma = largest - smallest;
    if (chroma == 0) continue;
    const int distance = 2 * largest + smallest - r - g - b;
    const int sixth = r == largest ? 0 + (b != smallest) : g == largest ? 2 + (b != smallest) : 4 + (r != smallest);
    const int hue =
        (hues[static_cast<size_t>(sixth) * kSixthSize + static_cast<size_t>(chroma * 256 + distance)] + shift) & 0xff;
    const int saturation = static_cast<int>(static_cast<float>(chroma) / static_cast<float>(largest) * 255.0);
    const float share = static_cast<float>(saturation) / 255.0F;
    const int new_sixth = hue * 6 / 255;
    const float place = static_cast<float>(hue * 6 - new_sixth * 255) / 255.0F;
    const double less = new_sixth % 2 != 0 ? static_cast<double>(share * place) : share * (1.0 - place);
    const uint8_t values[3] = {static_cast<uint8_t>(largest), rounded(largest * (1.0 - less)),
                               rounded(largest * (1.0 - share))};
    for (int c = 0; c < 3; ++c) pixel[c] = values[kOrders[new_sixth] >> (8 * c) & 0xff];
  }
}

void blend_row_plain(uint8_t* pixel, int count, BlendBase base, int mean, float factor) {
  for (int x = 0; x < count; ++x, pixel += kPixelBytes) {
    const int with = base == BlendBase::kGray ? gray_of(pixel) : mean;
    for (int c = 0; c < 3; ++c) pixel[c] = blended(with, pixel[c], factor);
  }
}

void gray_row_plain(uint8_t* pixel, int count) {
  for (int x = 0; x < count; ++x, pixel += kPixelBytes) std::fill_n(pixel, 3, static_cast<uint8_t>(gray_of(pixel)));
}

int64_t gray_sum_plain(const uint8_t* pixel, int count) {
  int64_t sum = 0;
  for (int x = 0; x < count; ++x, pixel += kPixelBytes) sum += gray_of(pixel);
  return sum;
}

#if defined(__x86_64__)

constexpr int kLanes = 8;  // pixels in a vector

[[gnu::target("avx2")]] inline __m256i load(const uint8_t* pixels) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pixels));
}

// The gray values, as 32-bit numbers.
[[gnu::target("avx2")]] inline __m256i gray_avx2(__m256i pixels) {
  const __m256i byte = _mm256_set1_epi32(0xff);
  const __m256i r = _mm256_and_si256(pixels, byte);
  const __m256i g = _mm256_and_si256(_mm256_srli_epi32(pixels, 8), byte);
  const __m256i b = _mm256_and_si256(_mm256_srli_epi32(pixels, 16), byte);
  const __m256i of_r = _mm256_add_epi32(_mm256_mullo_epi32(r, _mm256_set1_epi32(19595)), _mm256_set1_epi32(0x8000));
  const __m256i of_g = _mm256_mullo_epi32(g, _mm256_set1_epi32(38470));
  const __m256i of_b = _mm256_mullo_epi32(b, _mm256_set1_epi32(7471));
  return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(of_r, of_g), of_b), 16);
}

// The low byte of each 32-bit number, four times.
[[gnu::target("avx2")]] inline __m256i repeated_avx2(__m256i numbers) {
  const __m256i order = _mm256_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12,  //
                                         0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12);
  return _mm256_shuffle_epi8(numbers, order);
}

// Eight bytes of each.
[[gnu::target("avx2")]] inline __m256i blended_avx2(__m128i bases, __m128i values, __m256 factor) {
  const __m256i base = _mm256_cvtepu8_epi32(bases);
  const __m256i difference = _mm256_sub_epi32(_mm256_cvtepu8_epi32(values), base);
  const __m256 product = _mm256_mul_ps(factor, _mm256_cvtepi32_ps(difference));
  return _mm256_cvttps_epi32(_mm256_add_ps(_mm256_cvtepi32_ps(base), product));
}

[[gnu::target("avx2")]] int blend_row_avx2(uint8_t* row, int count, BlendBase base, int mean, float factor) {
  const __m256 factors = _mm256_set1_ps(factor);
  const __m256i means = _mm256_set1_epi8(static_cast<char>(mean));
  // The packing of bytes takes the halves of its vectors in turns.
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  int x = 0;
  for (; x + kLanes <= count; x += kLanes) {
    uint8_t* const at = row + static_cast<ptrdiff_t>(x) * kPixelBytes;
    const __m256i pixels = load(at);
    const __m256i with = base == BlendBase::kGray ? repeated_avx2(gray_avx2(pixels)) : means;
    const __m128i low = _mm256_castsi256_si128(pixels);
    const __m128i high = _mm256_extracti128_si256(pixels, 1);
    const __m128i low_with = _mm256_castsi256_si128(with);
    const __m128i high_with = _mm256_extracti128_si256(with, 1);
    const __m256i a = blended_avx2(low_with, low, factors);
    const __m256i b = blended_avx2(_mm_srli_si128(low_with, 8), _mm_srli_si128(low, 8), factors);
    const __m256i c = blended_avx2(high_with, high, factors);
    const __m256i d = blended_avx2(_mm_srli_si128(high_with, 8), _mm_srli_si128(high, 8), factors);
    const __m256i packed = _mm256_packus_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm256_permutevar8x32_epi32(packed, in_order));
  }
  return x;
}

[[gnu::target("avx2")]] int gray_row_avx2(uint8_t* row, int count) {
  int x = 0;
  for (; x + kLanes <= count; x += kLanes) {
    uint8_t* const at = row + static_cast<ptrdiff_t>(x) * kPixelBytes;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), repeated_avx2(gray_avx2(load(at))));
  }
  return x;
}

[[gnu::target("avx2")]] int64_t gray_sum_avx2(const uint8_t* row, int count) {
  __m256i sums = _mm256_setzero_si256();  // of less than 2^31: a row has fewer than 2^26 pixels of a lane
  int x = 0;
  for (; x + kLanes <= count; x += kLanes)
    sums = _mm256_add_epi32(sums, gray_avx2(load(row + static_cast<ptrdiff_t>(x) * kPixelBytes)));
  std::array<uint32_t, kLanes> lanes{};
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes.data()), sums);
  int64_t sum = gray_sum_plain(row + static_cast<ptrdiff_t>(x) * kPixelBytes, count - x);
  for (const uint32_t lane : lanes) sum += lane;
  return sum;
}

// The truncated products of eight floats and 255, in double precision.
[[gnu::target("avx2")]] inline __m256i times_255_avx2(__m256 parts) {
  const __m256d factor = _mm256_set1_pd(255.0);
  const __m256d low = _mm256_mul_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(parts)), factor);
  const __m256d high = _mm256_mul_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(parts, 1)), factor);
  return _mm256_set_m128i(_mm256_cvttpd_epi32(high), _mm256_cvttpd_epi32(low));
}

// round(value * (1 - part)), of four pixels.
[[gnu::target("avx2")]] inline __m128i less_avx2(__m128i values, __m256d parts) {
  const __m256d rest = _mm256_sub_pd(_mm256_set1_pd(1.0), parts);
  return _mm256_cvttpd_epi32(_mm256_add_pd(_mm256_mul_pd(_mm256_cvtepi32_pd(values), rest), _mm256_set1_pd(0.5)));
}

// The middle and the smallest values of four pixels, in the second and the third byte of 32.
[[gnu::target("avx2")]] inline __m128i lower_values_avx2(__m128i largest, __m128 shares, __m128 places,
                                                         __m128i is_odd) {
  const __m256d share = _mm256_cvtps_pd(shares);
  const __m256d odd = _mm256_cvtps_pd(_mm_mul_ps(shares, places));
  const __m256d even = _mm256_mul_pd(share, _mm256_sub_pd(_mm256_set1_pd(1.0), _mm256_cvtps_pd(places)));
  const __m256d less = _mm256_blendv_pd(even, odd, _mm256_castsi256_pd(_mm256_cvtepi32_epi64(is_odd)));
  return _mm_or_si128(_mm_slli_epi32(less_avx2(largest, less), 8), _mm_slli_epi32(less_avx2(largest, share), 16));
}

[[gnu::target("avx2")]] int shift_row_avx2(const Hues& hues, uint8_t* row, int count, uint8_t shift) {
  const __m256i byte = _mm256_set1_epi32(0xff);
  const __m256 all = _mm256_set1_ps(255.0F);
  const __m256i orders = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kOrders));
  const __m256i lane_bytes = _mm256_setr_epi32(0, 0x00040404, 0x00080808, 0x000c0c0c,  //
                                               0, 0x00040404, 0x00080808, 0x000c0c0c);
  int x = 0;
  for (; x + kLanes <= count; x += kLanes) {
    uint8_t* const at = row + static_cast<ptrdiff_t>(x) * kPixelBytes;
    const __m256i pixels = load(at);
    const __m256i r = _mm256_and_si256(pixels, byte);
    const __m256i g = _mm256_and_si256(_mm256_srli_epi32(pixels, 8), byte);
    const __m256i b = _mm256_and_si256(_mm256_srli_epi32(pixels, 16), byte);
    const __m256i largest = _mm256_max_epi32(_mm256_max_epi32(r, g), b);
    const __m256i smallest = _mm256_min_epi32(_mm256_min_epi32(r, g), b);
    const __m256i chroma = _mm256_sub_epi32(largest, smallest);
    const __m256i twice = _mm256_add_epi32(_mm256_add_epi32(largest, largest), smallest);
    const __m256i distance = _mm256_sub_epi32(twice, _mm256_add_epi32(_mm256_add_epi32(r, g), b));
    const __m256i is_r = _mm256_cmpeq_epi32(r, largest);
    const __m256i is_g = _mm256_andnot_si256(is_r, _mm256_cmpeq_epi32(g, largest));
    const __m256i is_b = _mm256_andnot_si256(_mm256_or_si256(is_r, is_g), _mm256_set1_epi32(-1));
    // The smallest in the first sixth of each pair is blue, blue and red.
    const __m256i is_first = _mm256_cmpeq_epi32(_mm256_blendv_epi8(b, r, is_b), smallest);
    __m256i sixth = _mm256_andnot_si256(is_first, _mm256_set1_epi32(1));
    sixth = _mm256_or_si256(sixth, _mm256_and_si256(is_g, _mm256_set1_epi32(2)));
    sixth = _mm256_or_si256(sixth, _mm256_and_si256(is_b, _mm256_set1_epi32(4)));
    const __m256i of_sixth = _mm256_or_si256(_mm256_slli_epi32(chroma, 8), distance);
    const __m256i index = _mm256_or_si256(_mm256_slli_epi32(sixth, 16), of_sixth);
    __m256i hue = _mm256_i32gather_epi32(reinterpret_cast<const int*>(hues.data()), index, 1);
    hue = _mm256_and_si256(_mm256_add_epi32(hue, _mm256_set1_epi32(shift)), byte);
    // Of black, 0 / 0 becomes 0.
    const __m256 part = _mm256_div_ps(_mm256_cvtepi32_ps(chroma), _mm256_cvtepi32_ps(largest));
    const __m256i saturation = _mm256_and_si256(times_255_avx2(part), byte);
    const __m256 share = _mm256_div_ps(_mm256_cvtepi32_ps(saturation), all);
    const __m256i new_sixth = _mm256_mulhi_epu16(hue, _mm256_set1_epi32(1543));  // hue * 6 / 255
    const __m256i in_sixth = _mm256_sub_epi32(_mm256_mullo_epi16(hue, _mm256_set1_epi32(6)),
                                              _mm256_mullo_epi16(new_sixth, _mm256_set1_epi32(255)));
    const __m256 place = _mm256_div_ps(_mm256_cvtepi32_ps(in_sixth), all);
    const __m256i is_odd = _mm256_srai_epi32(_mm256_slli_epi32(new_sixth, 31), 31);
    const __m128i low = lower_values_avx2(_mm256_castsi256_si128(largest), _mm256_castps256_ps128(share),
                                          _mm256_castps256_ps128(place), _mm256_castsi256_si128(is_odd));
    const __m128i high = lower_values_avx2(_mm256_extracti128_si256(largest, 1), _mm256_extractf128_ps(share, 1),
                                           _mm256_extractf128_ps(place, 1), _mm256_extracti128_si256(is_odd, 1));
    const __m256i values = _mm256_or_si256(largest, _mm256_set_m128i(high, low));
    const __m256i order = _mm256_add_epi32(_mm256_permutevar8x32_epi32(orders, new_sixth), lane_bytes);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), _mm256_shuffle_epi8(values, order));
  }
  return x;
}

#else

int blend_row_avx2(uint8_t*, int, BlendBase, int, float) { return 0; }
int gray_row_avx2(uint8_t*, int) { return 0; }
int64_t gray_sum_avx2(const uint8_t* row, int count) { return gray_sum_plain(row, count); }
int shift_row_avx2(const Hues&, uint8_t*, int, uint8_t) { return 0; }

#endif

// The mean of the gray values, rounded.
int mean_of(const Pixels& image) {
  int64_t sum = 0;
  const bool has_avx2 = uses_avx2();
  for (int y = 0; y < image.height; ++y)
    sum += has_avx2 ? gray_sum_avx2(image.row(y), image.width) : gray_sum_plain(image.row(y), image.width);
  const int64_t count = static_cast<int64_t>(image.width) * image.height;
  return static_cast<int>(static_cast<double>(sum) / static_cast<double>(count) + 0.5);
}

}  // namespace

void blend(const Pixels& image, BlendBase base, float factor) {
  const int mean = base == BlendBase::kMean ? mean_of(image) : 0;
  const bool has_avx2 = uses_avx2();
  for (int y = 0; y < image.height; ++y) {
    const int done = has_avx2 ? blend_row_avx2(image.row(y), image.width, base, mean, factor) : 0;
    blend_row_plain(image.pixel(done, y), image.width - done, base, mean, factor);
  }
}

void make_gray(const Pixels& image) {
  const bool has_avx2 = uses_avx2();
  for (int y = 0; y < image.height; ++y) {
    const int done = has_avx2 ? gray_row_avx2(image.row(y), image.width) : 0;
    gray_row_plain(image.pixel(done, y), image.width - done);
  }
}

void shift_hue(const Pixels& image, uint8_t shift) {
  const Hues& hues = all_hues();
  const bool has_avx2 = uses_avx2();
  for (int y = 0; y < image.height; ++y) {
    const int done = has_avx2 ? shift_row_avx2(hues, image.row(y), image.width, shift) : 0;
    shift_row_plain(hues, image.pixel(done, y), image.width - done, shift);
  }
}

void look_up(const Pixels& image, ByteTables tables) {
  for (int y = 0; y < image.height; ++y) {
    uint8_t* pixel = image.row(y);
    for (int x = 0; x < image.width; ++x, pixel += kPixelBytes) {
      for (size_t c = 0; c < 3; ++c) pixel[c] = tables[256 * c + pixel[c]];
    }
  }
}

}  // namespace penstock::image
