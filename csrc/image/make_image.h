// SPDX-License-Identifier: Apache-2.0
#pragma once
// Makes the pixels of one sample from a JPEG or PNG file, as a chain of Pillow's calls would: decode, crop, resize,
// crop, further steps such as changes of colours, flip. Only the pixels that the chain needs are decoded.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "base/result.h"
#include "image/colour.h"
#include "image/jpeg.h"
#include "image/png.h"
#include "image/resample.h"

namespace penstock::image {

struct Resize {
  int width = 0;
  int height = 0;
  Filter filter = Filter::kBilinear;
  PassOrder order = PassOrder::kByShrinkage;
  std::optional<std::array<float, 4>> box{};  // left, top, right and bottom of the part that is resized

  Side columns(int image_width) const;
  Side rows(int image_height) const;
};

struct Blend {
  BlendBase base = BlendBase::kBlack;
  float factor = 1;
};

struct Gray {};

struct HueShift {
  uint8_t shift = 0;
};

struct Table {
  std::array<uint8_t, ByteTables::extent> bytes{};
};

// The image within a border of one colour.
struct Padding {
  int left = 0;
  int top = 0;
  int right = 0;
  int bottom = 0;
  std::array<uint8_t, 3> colour{};
};

struct Flip {
  bool columns = false;
  bool rows = false;
};

// One operation on an image; a Window crops it.
using Step = std::variant<Blend, Gray, HueShift, Table, Window, Padding, Resize, Flip>;

struct ImageSpec {
  Window decoded{};  // of the file's image
  std::optional<Resize> resize{};
  Window crop{};               // of the resized image
  std::vector<Step> steps{};   // of the crop, in this order
  bool flips_columns = false;  // of the result
  bool flips_rows = false;
  bool is_gray = false;  // The result has one channel, R.

  int channels() const { return is_gray ? 1 : 3; }
};

// Three tables of 256 numbers, one for each of R, G and B: the value of each byte.
constexpr size_t kTableSize = size_t{3} * 256;

// Reuses its memory from call to call. Confined to one thread.
class ImageMaker {
 public:
  explicit ImageMaker(const JpegLibrary& library) : jpeg_(library.make_decoder()) {}

  // A file that open() has begun to decode. `number` tells make() to continue with it, if no other file was opened
  // since; it opens the file with any other number. The number is unique in the process.
  struct Opened {
    ImageHeader header{};
    int64_t number = 0;
  };
  // kUnsupported, with the reason, if the file is left to its library.
  Result<Opened> open(std::span<const std::byte> file);

  // Makes the image of `spec`, whose windows must be within their images, and sizes positive, from a file.
  // kUnsupported, with the reason, if the file is left to its library.
  Result<void> make(std::span<const std::byte> file, int64_t number, const ImageSpec& spec);

  // The size of the image that was made last.
  ImageSize size() const { return {.width = made_.width, .height = made_.height}; }

  // Write the image that was made last: as bytes [height][width][channels], or as numbers [3][height][width] by
  // `tables`.
  void write_bytes(uint8_t* output) const;
  void write_planes(std::span<const float, kTableSize> tables, float* output) const;

 private:
  // Opens the file, unless it is the one with this number and nothing of it has been decoded.
  Result<ImageSize> reopen(std::span<const std::byte> file, int64_t number);

  // Memory for an image of this size, apart from the memory of `made_`. Valid until the call after the next one.
  Pixels make_room(int width, int height);
  void apply(const Step& step);  // to `made_`
  void resize(const Resize& resize, const Side& columns, const Side& rows);

  Decoder& decoder_of(std::span<const std::byte> file);

  std::unique_ptr<Decoder> jpeg_;
  PngDecoder png_;
  Opened opened_;  // number: 0 once its pixels are decoded
  Resizer resizer_;
  std::array<std::vector<uint8_t>, 2> rooms_;
  size_t newest_room_ = 0;
  Pixels made_;  // not flipped
  bool is_gray_ = false;
  bool flips_columns_ = false;
  bool flips_rows_ = false;
};

}  // namespace penstock::image
