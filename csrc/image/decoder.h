// SPDX-License-Identifier: Apache-2.0
#pragma once
// What reads the pixels of an image file.

#include <cstddef>
#include <span>

#include "base/result.h"
#include "image/resample.h"

namespace penstock::image {

struct ImageSize {
  int width = 0;
  int height = 0;

  friend bool operator==(const ImageSize&, const ImageSize&) = default;
};

struct Window {
  int left = 0;
  int top = 0;
  int width = 0;
  int height = 0;
};

struct ImageHeader {
  ImageSize size{};
  int channels = 0;  // 1 for gray, or 3
};

// Whether a window has pixels, all within an image of this size.
inline bool is_within(const Window& window, int width, int height) {
  return window.left >= 0 && window.top >= 0 && window.width > 0 && window.height > 0 &&
         window.width <= width - window.left && window.height <= height - window.top;
}

// Reuses its memory from call to call. Confined to one thread.
class Decoder {
 public:
  Decoder() = default;
  virtual ~Decoder() = default;
  Decoder(const Decoder&) = delete;
  Decoder& operator=(const Decoder&) = delete;

  // Reads the header of `file`, which must stay as it is until the pixels are decoded, and may start to decode.
  // kUnsupported, with the reason, for files that are left to Pillow.
  virtual Result<ImageHeader> open(std::span<const std::byte> file) = 0;

  // Decodes a window within the opened file, once for each open(). The pixels are valid until the next call, and the
  // caller may change them; gray is repeated for R, G and B. kUnsupported, with the reason, if the data are damaged.
  virtual Result<Pixels> decode(const Window& window) = 0;
};

}  // namespace penstock::image
