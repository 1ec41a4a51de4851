// SPDX-License-Identifier: Apache-2.0
#include "image/resample.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <numbers>

#include "base/result.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace penstock::image {
namespace {

constexpr int kWeightBits = 22;
constexpr int32_t kHalf = 1 << (kWeightBits - 1);
double sinc(double x) { return x == 0 ? 1.0 : std::sin(x * std::numbers::pi) / (x * std::numbers::pi); }

double support_of(Filter filter) {
  switch (filter) {
    case Filter::kBox: return 0.5;
    case Filter::kBilinear:
    case Filter::kHamming: return 1.0;
    case Filter::kBicubic: return 2.0;
    case Filter::kLanczos: return 3.0;
  }
  return 0;
}

double value_of(Filter filter, double x) {
  switch (filter) {
    case Filter::kBox: return x > -0.5 && x <= 0.5 ? 1.0 : 0.0;
    case Filter::kBilinear: return std::max(0.0, 1.0 - std::abs(x));
    case Filter::kHamming: {
      x = std::abs(x);
      if (x == 0) return 1.0;
      if (x >= 1) return 0.0;
      x *= std::numbers::pi;
      return std::sin(x) / x * (0.54F + 0.46F * std::cos(x));  // Pillow's constants are floats
    }
    case Filter::kBicubic: {  // R. Keys's convolution, a = -0.5
      constexpr double a = -0.5;
      x = std::abs(x);
      if (x < 1) return ((a + 2.0) * x - (a + 3.0)) * x * x + 1;
      if (x < 2) return (((x - 5) * x + 8) * x - 4) * a;
      return 0.0;
    }
    case Filter::kLanczos: return x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0.0;
  }
  return 0;
}

uint8_t to_byte(int32_t sum) { return static_cast<uint8_t>(std::clamp(sum >> kWeightBits, 0, 255)); }

void columns_plain(const Pixels& input, const Weights& weights, const Pixels& output) {
  for (int y = 0; y < output.height; ++y) {
    const uint8_t* const row = input.row(y);
    uint8_t* to = output.row(y);
    for (int x = 0; x < output.width; ++x, to += kPixelBytes) {
      const int32_t* const w = &weights.weights[static_cast<size_t>(x) * static_cast<size_t>(weights.taps)];
      const uint8_t* const from = row + static_cast<ptrdiff_t>(weights.first[static_cast<size_t>(x)]) * kPixelBytes;
      int32_t sums[3] = {kHalf, kHalf, kHalf};
      for (int tap = 0; tap < weights.count[static_cast<size_t>(x)]; ++tap) {
        for (int c = 0; c < 3; ++c) sums[c] += from[tap * kPixelBytes + c] * w[tap];
      }
      for (int c = 0; c < 3; ++c) to[c] = to_byte(sums[c]);
    }
  }
}

void rows_plain(const Pixels& input, const Weights& weights, const Pixels& output) {
  for (int y = 0; y < output.height; ++y) {
    const int32_t* const w = &weights.weights[static_cast<size_t>(y) * static_cast<size_t>(weights.taps)];
    const uint8_t* const from = input.row(weights.first[static_cast<size_t>(y)]);
    uint8_t* const to = output.row(y);
    for (int i = 0; i < output.width * kPixelBytes; ++i) {
      int32_t sum = kHalf;
      for (int tap = 0; tap < weights.count[static_cast<size_t>(y)]; ++tap)
        sum += from[tap * input.stride + i] * w[tap];
      to[i] = to_byte(sum);
    }
  }
}

constexpr int kPairedTapsMax = 4096;

#if defined(__x86_64__)

// A weight is high * 2^11 + low, 0 <= low < 2^11, so that both halves are factors of 16-bit products. Two taps are
// multiplied and added at once. The sum of the parts is the exact sum, as no part overflows 32 bits: with weights whose
// magnitudes sum to less than 2^24, |sum of highs| < 255 * 2^13 and sum of lows < 255 * 2^11 * kPairedTapsMax.
constexpr int kLowBits = 11;

// The halves of the weights of two taps each, in pairs of 16 bits; the last tap of an odd number is paired with 0.
struct PairedWeights {
  explicit PairedWeights(const Weights& weights) : pairs(weights.taps / 2 + 1) {
    const size_t positions = weights.first.size();
    high.resize(positions * static_cast<size_t>(pairs));
    low.resize(positions * static_cast<size_t>(pairs));
    constexpr int32_t kMask = (1 << kLowBits) - 1;
    const auto pair = [](int32_t a, int32_t b) {
      return static_cast<int32_t>((static_cast<uint32_t>(a) & 0xffff) | (static_cast<uint32_t>(b) << 16));
    };
    for (size_t i = 0; i < positions; ++i) {
      const int32_t* const w = &weights.weights[i * static_cast<size_t>(weights.taps)];
      for (int tap = 0; tap < weights.count[i]; tap += 2) {
        const size_t place = i * static_cast<size_t>(pairs) + static_cast<size_t>(tap / 2);
        const int32_t second = tap + 1 < weights.count[i] ? w[tap + 1] : 0;
        high[place] = pair(w[tap] >> kLowBits, second >> kLowBits);
        low[place] = pair(w[tap] & kMask, second & kMask);
      }
    }
  }

  int pairs;
  std::vector<int32_t> high;
  std::vector<int32_t> low;
};

// 16 bytes of a row at once, from two rows as pairs of 16 bits.
[[gnu::target("avx2")]] void rows_avx2(const Pixels& input, const Weights& weights, const Pixels& output) {
  const PairedWeights paired(weights);
  const int bytes = output.width * kPixelBytes;
  const __m256i half = _mm256_set1_epi32(kHalf);
  for (int y = 0; y < output.height; ++y) {
    const auto place = static_cast<size_t>(y);
    const int32_t* const w = &weights.weights[place * static_cast<size_t>(weights.taps)];
    const int32_t* const highs = &paired.high[place * static_cast<size_t>(paired.pairs)];
    const int32_t* const lows = &paired.low[place * static_cast<size_t>(paired.pairs)];
    const uint8_t* const from = input.row(weights.first[place]);
    uint8_t* const to = output.row(y);
    const int count = weights.count[place];
    int i = 0;
    for (; i + 16 <= bytes; i += 16) {
      __m256i high_a = _mm256_setzero_si256();
      __m256i high_b = _mm256_setzero_si256();
      __m256i low_a = half;
      __m256i low_b = half;
      for (int tap = 0; tap < count; tap += 2) {
        const uint8_t* const row = from + tap * input.stride + i;
        const uint8_t* const next = tap + 1 < count ? row + input.stride : row;  // its weight is 0
        const __m256i first = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row)));
        const __m256i second = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(next)));
        const __m256i high = _mm256_set1_epi32(highs[tap / 2]);
        const __m256i low = _mm256_set1_epi32(lows[tap / 2]);
        const __m256i a = _mm256_unpacklo_epi16(first, second);
        const __m256i b = _mm256_unpackhi_epi16(first, second);
        high_a = _mm256_add_epi32(high_a, _mm256_madd_epi16(a, high));
        high_b = _mm256_add_epi32(high_b, _mm256_madd_epi16(b, high));
        low_a = _mm256_add_epi32(low_a, _mm256_madd_epi16(a, low));
        low_b = _mm256_add_epi32(low_b, _mm256_madd_epi16(b, low));
      }
      const __m256i sum_a = _mm256_add_epi32(_mm256_slli_epi32(high_a, kLowBits), low_a);
      const __m256i sum_b = _mm256_add_epi32(_mm256_slli_epi32(high_b, kLowBits), low_b);
      const __m256i words =
          _mm256_packs_epi32(_mm256_srai_epi32(sum_a, kWeightBits), _mm256_srai_epi32(sum_b, kWeightBits));
      const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi16(words, words), 0b1000);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm256_castsi256_si128(packed));
    }
    for (; i < bytes; ++i) {
      int32_t sum = kHalf;
      for (int tap = 0; tap < count; ++tap) sum += from[tap * input.stride + i] * w[tap];
      to[i] = to_byte(sum);
    }
  }
}

// Two rows at once: a pixel of each in the halves of a vector.
[[gnu::target("avx2")]] void columns_avx2(const Pixels& input, const Weights& weights, const Pixels& output) {
  const PairedWeights paired(weights);
  // From two pixels of four bytes to pairs of 16 bits: R0 R1, G0 G1, B0 B1, X0 X1.
  const __m256i order = _mm256_setr_epi8(0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1,  //
                                         0, -1, 4, -1, 1, -1, 5, -1, 2, -1, 6, -1, 3, -1, 7, -1);
  const __m256i half = _mm256_set1_epi32(kHalf);
  for (int y = 0; y < output.height; y += 2) {
    const int other = std::min(y + 1, output.height - 1);
    for (int x = 0; x < output.width; ++x) {
      const auto place = static_cast<size_t>(x);
      const int32_t* const highs = &paired.high[place * static_cast<size_t>(paired.pairs)];
      const int32_t* const lows = &paired.low[place * static_cast<size_t>(paired.pairs)];
      const int count = weights.count[place];
      const ptrdiff_t from = static_cast<ptrdiff_t>(weights.first[place]) * kPixelBytes;
      const uint8_t* const a = input.row(y) + from;
      const uint8_t* const b = input.row(other) + from;
      __m256i high = _mm256_setzero_si256();
      __m256i low = half;
      for (int tap = 0; tap < count; tap += 2) {
        const __m128i of_a = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(a + tap * kPixelBytes));
        const __m128i of_b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(b + tap * kPixelBytes));
        const __m256i pixels =
            _mm256_shuffle_epi8(_mm256_inserti128_si256(_mm256_castsi128_si256(of_a), of_b, 1), order);
        high = _mm256_add_epi32(high, _mm256_madd_epi16(pixels, _mm256_set1_epi32(highs[tap / 2])));
        low = _mm256_add_epi32(low, _mm256_madd_epi16(pixels, _mm256_set1_epi32(lows[tap / 2])));
      }
      const __m256i sum = _mm256_srai_epi32(_mm256_add_epi32(_mm256_slli_epi32(high, kLowBits), low), kWeightBits);
      const __m256i bytes = _mm256_packus_epi16(_mm256_packs_epi32(sum, sum), _mm256_setzero_si256());
      const auto first = static_cast<uint32_t>(_mm256_extract_epi32(bytes, 0));
      const auto second = static_cast<uint32_t>(_mm256_extract_epi32(bytes, 4));
      std::memcpy(output.row(y) + static_cast<ptrdiff_t>(x) * kPixelBytes, &first, sizeof first);
      std::memcpy(output.row(other) + static_cast<ptrdiff_t>(x) * kPixelBytes, &second, sizeof second);
    }
  }
}

bool has_avx2() { return __builtin_cpu_supports("avx2"); }

#else

bool has_avx2() { return false; }
void rows_avx2(const Pixels& input, const Weights& weights, const Pixels& output) {
  rows_plain(input, weights, output);
}
void columns_avx2(const Pixels& input, const Weights& weights, const Pixels& output) {
  columns_plain(input, weights, output);
}

#endif

std::atomic<bool> is_avx2_used{has_avx2()};

void check(const Side& side) {
  PENSTOCK_ASSERT(0 <= side.begin && side.begin < side.end && side.end <= static_cast<float>(side.size),
                  "the part is not within the image");
}

}  // namespace

bool uses_avx2() { return is_avx2_used; }
void set_avx2_for_test(bool is_used) { is_avx2_used = is_used && has_avx2(); }

Reach reach_of(const Side& side, int output_size, Filter filter) {
  check(side);
  const double scale = static_cast<double>(side.end - side.begin) / output_size;
  // Rounding may add one pixel.
  const double support = support_of(filter) * std::max(scale, 1.0) + 1;
  return {.begin = std::max(0, static_cast<int>(std::floor(side.begin - support))),
          .end = std::min(side.size, static_cast<int>(std::ceil(side.end + support)))};
}

Weights make_weights(const Side& side, int output_size, Filter filter) {
  check(side);
  const double scale = static_cast<double>(side.end - side.begin) / output_size;
  const double stretch = std::max(scale, 1.0);
  const double support = support_of(filter) * stretch;
  Weights made;
  made.taps = static_cast<int>(std::ceil(support)) * 2 + 1;
  made.first.resize(static_cast<size_t>(output_size));
  made.count.resize(static_cast<size_t>(output_size));
  made.weights.assign(static_cast<size_t>(output_size) * static_cast<size_t>(made.taps), 0);
  std::vector<double> values(static_cast<size_t>(made.taps));
  for (int i = 0; i < output_size; ++i) {
    const double center = side.begin + (i + 0.5) * scale;
    const int first = std::max(0, static_cast<int>(center - support + 0.5));
    const int count = std::min(side.size, static_cast<int>(center + support + 0.5)) - first;
    double sum = 0;
    for (int tap = 0; tap < count; ++tap) {
      values[static_cast<size_t>(tap)] = value_of(filter, (tap + first - center + 0.5) * (1.0 / stretch));
      sum += values[static_cast<size_t>(tap)];
    }
    int32_t* const weights = &made.weights[static_cast<size_t>(i) * static_cast<size_t>(made.taps)];
    for (int tap = 0; tap < count; ++tap) {
      const double value = sum == 0 ? values[static_cast<size_t>(tap)] : values[static_cast<size_t>(tap)] / sum;
      const double scaled = value * (1 << kWeightBits);
      weights[tap] = static_cast<int32_t>(value < 0 ? scaled - 0.5 : scaled + 0.5);
    }
    made.first[static_cast<size_t>(i)] = first - side.offset;
    made.count[static_cast<size_t>(i)] = count;
  }
  return made;
}

namespace {

bool resizes_rows_first(const Side& columns, const Side& rows, const Pixels& output, PassOrder order) {
  const int fewer_rows = rows.size - output.height;
  return order == PassOrder::kByShrinkage && fewer_rows > 0 && fewer_rows > 2 * (columns.size - output.width);
}

bool is_changed(const Side& side, int output_size) {
  const auto size = static_cast<float>(output_size);
  return output_size != side.size || side.begin != 0 || side.end != size;
}

Side whole(int size) { return {.size = size, .begin = 0, .end = static_cast<float>(size)}; }

}  // namespace

void Resizer::resize(const Pixels& input, Filter filter, PassOrder order, const Pixels& output) {
  resize(input, whole(input.width), whole(input.height), filter, order, output);
}

void Resizer::resize(const Pixels& input, const Side& columns_side, const Side& rows_side, Filter filter,
                     PassOrder order, const Pixels& output) {
  const auto has_avx = [](const Weights& weights) { return is_avx2_used && weights.taps <= kPairedTapsMax; };
  const auto columns = [&](const Pixels& from, const Pixels& to) {
    const Weights weights = make_weights(columns_side, to.width, filter);
    has_avx(weights) ? columns_avx2(from, weights, to) : columns_plain(from, weights, to);
  };
  const auto rows = [&](const Pixels& from, const Pixels& to) {
    const Weights weights = make_weights(rows_side, to.height, filter);
    has_avx(weights) ? rows_avx2(from, weights, to) : rows_plain(from, weights, to);
  };
  const bool has_columns = is_changed(columns_side, output.width);
  const bool has_rows = is_changed(rows_side, output.height);
  if (has_columns && has_rows) {
    const bool is_rows_first = resizes_rows_first(columns_side, rows_side, output, order);
    Pixels between{.width = is_rows_first ? input.width : output.width,
                   .height = is_rows_first ? output.height : input.height};
    between.stride = static_cast<ptrdiff_t>(between.width) * kPixelBytes;
    between_.resize(static_cast<size_t>(between.stride) * static_cast<size_t>(between.height) + kSpareBytes);
    between.data = between_.data();
    is_rows_first ? rows(input, between) : columns(input, between);
    is_rows_first ? columns(between, output) : rows(between, output);
  } else if (has_columns) {
    columns(input, output);
  } else if (has_rows) {
    rows(input, output);
  } else {
    for (int y = 0; y < output.height; ++y)
      std::memcpy(output.row(y), input.row(y), static_cast<size_t>(output.width) * kPixelBytes);
  }
}

}  // namespace penstock::image
