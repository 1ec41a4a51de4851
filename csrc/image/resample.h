// SPDX-License-Identifier: Apache-2.0
#pragma once
// Pillow's resize of 8-bit images, byte for byte: separable convolution with fixed-point weights in two passes, each
// rounded to bytes.
//
// For output position i of a side that maps [from, end) of the input to `size` pixels, with scale = (end - from) /
// size and s = max(scale, 1), the weight of the input pixel j is f((j + 0.5 - center) / s), center = from + (i + 0.5)
// * scale, for |j + 0.5 - center| < s * support; the weights of a position are divided by their sum and rounded to
// multiples of 2^-22 (P. Heckbert's "Fundamentals of Texture Mapping", 1989, describes the filters' scaling; Pillow's
// documentation names the filters).

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace penstock::image {

// Pillow's filters, with its numbers of Image.Resampling.
enum class Filter : uint8_t { kLanczos = 1, kBilinear = 2, kBicubic = 3, kBox = 4, kHamming = 5 };

// Which side is resized first: up to Pillow 12 always the columns; since Pillow 13 the rows if their number shrinks by
// more than twice the columns'.
enum class PassOrder : uint8_t { kColumnsFirst, kByShrinkage };

// Pixels of four bytes each (RGBX), rows `stride` bytes apart; kSpareBytes behind the last one may be read. The fourth
// byte of results is undefined.
constexpr int kPixelBytes = 4;
constexpr size_t kSpareBytes = 4;
struct Pixels {
  uint8_t* data = nullptr;
  int width = 0;
  int height = 0;
  ptrdiff_t stride = 0;

  uint8_t* row(int y) const { return data + y * stride; }
  uint8_t* pixel(int x, int y) const { return row(y) + static_cast<ptrdiff_t>(x) * kPixelBytes; }
};

// The weights of one side. The pixels of output position i are those from first[i] on, `taps` of them in the table;
// weights beyond the filter's reach are 0.
struct Weights {
  int taps = 0;
  std::vector<int> first;
  std::vector<int> count;        // of the taps that the filter reaches
  std::vector<int32_t> weights;  // [position][tap], in units of 2^-22
};

// One side of an input: its part from `begin` to `end` is mapped to the output. Positions are those of an image with
// `size` pixels on this side, of which the input has the pixels from `offset` on, as far as the filter reaches.
struct Side {
  int size = 0;
  float begin = 0;
  float end = 0;
  int offset = 0;
};
Weights make_weights(const Side& side, int output_size, Filter filter);
inline Weights make_weights(int input_size, int output_size, Filter filter) {
  return make_weights({.size = input_size, .begin = 0, .end = static_cast<float>(input_size)}, output_size, filter);
}

// The pixels of a side that its weights need: the first one, and one behind the last.
struct Reach {
  int begin = 0;
  int end = 0;
};
Reach reach_of(const Side& side, int output_size, Filter filter);

// Reuses its memory from call to call. Confined to one thread.
class Resizer {
 public:
  // Resizes all of `input` to the size of `output`.
  void resize(const Pixels& input, Filter filter, PassOrder order, const Pixels& output);
  // The same for a part of an image; `input` has the pixels that it needs.
  void resize(const Pixels& input, const Side& columns, const Side& rows, Filter filter, PassOrder order,
              const Pixels& output);

 private:
  std::vector<uint8_t> between_;  // after the first pass
};

// Whether the vectors of AVX2 are used: if this CPU has them, unless a test has switched them off.
bool uses_avx2();
void set_avx2_for_test(bool is_used);

}  // namespace penstock::image
