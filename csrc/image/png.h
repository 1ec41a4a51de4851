// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decodes PNG files (https://www.w3.org/TR/png-3/) of the usual kind to the pixels that Pillow has after a conversion
// to RGB. libdeflate decompresses them.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "image/decoder.h"

struct libdeflate_decompressor;

namespace penstock::image {

constexpr int kPngPixelsMax = 1 << 25;  // of a file that is decoded here

// Whether a file starts as a PNG file does.
bool is_png(std::span<const std::byte> file);

class PngDecoder final : public Decoder {
 public:
  PngDecoder();
  ~PngDecoder() override;

  // Leaves those files to Pillow that are not one complete image of 8-bit gray, RGB, RGBA or palette pixels, from top
  // to bottom, without transparent colours, without chunks behind the pixels, and with correct checksums.
  Result<ImageHeader> open(std::span<const std::byte> file) override;
  Result<Pixels> decode(const Window& window) override;

 private:
  Result<void> read_chunks();
  Result<void> read_header(std::span<const uint8_t> data);
  Result<void> decompress();
  bool convert(const uint8_t* row, const Window& window, uint8_t* pixels) const;

  struct Free {
    void operator()(libdeflate_decompressor* one) const;
  };
  std::unique_ptr<libdeflate_decompressor, Free> decompressor_;

  std::span<const uint8_t> file_;
  ImageSize size_;
  int bytes_per_pixel_ = 0;
  std::vector<uint8_t> palette_;                  // four bytes a colour; empty without one
  std::vector<std::span<const uint8_t>> packed_;  // the parts of the compressed pixels
  std::vector<uint8_t> joined_;                   // these, if there are several
  std::vector<uint8_t> rows_;                     // each with its filter before it
  std::vector<uint8_t> pixels_;
};

}  // namespace penstock::image
