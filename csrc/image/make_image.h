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

  // A file that open() has begun to decode. `number` tells make() to continue with it, if no other file was opened
  // since; it opens the file with any other number. The number is unique in the process.
  struct Opened {
    JpegHeader header{};
    int64_t number = 0;
  };
  // kUnsupported, with the reason, if the file is left to its library.
  Result<Opened> open(std::span<const std::byte> file);

  // Makes the image of `spec`, whose windows must be within their images, from a file. kUnsupported, with the reason,
  // if the file is left to its library.
  Result<void> make(std::span<const std::byte> file, int64_t number, const ImageSpec& spec);

  // Write the image that was made last: as bytes [height][width][3], or as numbers [3][height][width] by `tables`.
  void write_bytes(uint8_t* output) const;
  void write_planes(std::span<const float, kTableSize> tables, float* output) const;

 private:
  // Opens the file, unless it is the one with this number and nothing of it has been decoded.
  Result<JpegSize> reopen(std::span<const std::byte> file, int64_t number);

  std::unique_ptr<JpegDecoder> decoder_;
  Opened opened_;  // number: 0 once its pixels are decoded
  Resizer resizer_;
  std::vector<uint8_t> resized_;
  Pixels made_;  // not flipped
  bool flips_columns_ = false;
  bool flips_rows_ = false;
};

}  // namespace penstock::image
