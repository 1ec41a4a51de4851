// SPDX-License-Identifier: Apache-2.0
#pragma once
// Makes the pixels of one sample from a JPEG file, as a chain of Pillow's calls would: decode, crop, resize, crop,
// flip. Only the pixels that the chain needs are decoded, and they are written once, in their final form.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/result.h"
#include "image/jpeg.h"
#include "image/resample.h"

namespace penstock::image {

struct Resize {
  int width = 0;
  int height = 0;
  Filter filter = Filter::kBilinear;
  PassOrder order = PassOrder::kByShrinkage;
};

struct ImageSpec {
  Window decoded{};  // of the file's image
  std::optional<Resize> resize{};
  Window crop{};  // of the resized image
  bool flips_columns = false;
  bool flips_rows = false;
};

// Three tables of 256 numbers, one for each of R, G and B: the value of each byte.
constexpr size_t kTableSize = size_t{3} * 256;

// Reuses its memory from call to call. Confined to one thread.
class ImageMaker {
 public:
  explicit ImageMaker(const JpegLibrary& library) : decoder_(library.make_decoder()) {}

  // A file that open() has begun to decode. `number` tells make() and decode_rgb() to continue with it, if no other
  // file was opened since; they open the file with any other number. It is unique in the process.
  struct Opened {
    JpegHeader header{};
    int64_t number = 0;
  };
  // kUnsupported, with the reason, if the file is left to its library.
  Result<Opened> open(std::span<const std::byte> file, JpegFormat format);

  // Makes the image of `spec`, whose windows must be within their images, from a file of format kRgbx. kUnsupported,
  // with the reason, if the file is left to its library.
  Result<void> make(std::span<const std::byte> file, int64_t number, const ImageSpec& spec);
  // Decodes only a window of a file of format kRgb, into its place in the whole image of this size, as
  // JpegDecoder::decode_rgb.
  Result<void> decode_rgb(std::span<const std::byte> file, int64_t number, const JpegSize& size, const Window& window,
                          uint8_t* image);

  // Write the image that was made last: as bytes [height][width][3], or as numbers [3][height][width] by `tables`.
  void write_bytes(uint8_t* output) const;
  void write_planes(std::span<const float, kTableSize> tables, float* output) const;

 private:
  // Opens the file, unless it is the one with this number and nothing of it has been decoded.
  Result<JpegSize> reopen(std::span<const std::byte> file, int64_t number, JpegFormat format);

  std::unique_ptr<JpegDecoder> decoder_;
  Opened opened_;  // number: 0 once its pixels are decoded
  Resizer resizer_;
  std::vector<uint8_t> resized_;
  Pixels made_;  // not flipped
  bool flips_columns_ = false;
  bool flips_rows_ = false;
};

}  // namespace penstock::image
