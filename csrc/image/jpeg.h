// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decodes a part of a JPEG file by the copy of libjpeg-turbo that Pillow is linked with, with the pixels that Pillow
// has there: by the accurate integer DCT and smooth upsampling, the library's defaults. Files that it might treat
// differently are refused: Pillow decodes them, or raises an exception about them.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/result.h"
#include "image/resample.h"

namespace penstock::image {

struct JpegSize {
  int width = 0;
  int height = 0;

  friend bool operator==(const JpegSize&, const JpegSize&) = default;
};

struct Window {
  int left = 0;
  int top = 0;
  int width = 0;
  int height = 0;
};

struct JpegHeader {
  JpegSize size{};
  int channels = 0;  // 1 for gray, or 3
};

// Whether a window has pixels, all within an image of this size.
bool is_within(const Window& window, int width, int height);

// Reuses its memory from call to call. Confined to one thread.
class JpegDecoder {
 public:
  JpegDecoder() = default;
  virtual ~JpegDecoder() = default;
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;

  // Reads the header of `file`, which must stay as it is until the pixels are decoded, and starts to decode: files with
  // several scans are read to their end. kUnsupported, with the reason, for files that are not one complete image of
  // 8-bit YCbCr, RGB or gray pixels with the usual markers.
  virtual Result<JpegHeader> open(std::span<const std::byte> file) = 0;

  // Decodes a window within the opened file, once for each open(). The pixels are valid until the next call; gray is
  // repeated for R, G and B. kUnsupported, with the reason, if the data of the window are damaged.
  virtual Result<Pixels> decode(const Window& window) = 0;
};

// Thread-safe.
class JpegLibrary {
 public:
  JpegLibrary() = default;
  virtual ~JpegLibrary() = default;
  JpegLibrary(const JpegLibrary&) = delete;
  JpegLibrary& operator=(const JpegLibrary&) = delete;

  // The library that the shared object at `path`, such as Pillow's `_imaging`, is linked with; it stays for as long as
  // the process. A process may have several copies of different versions, with different layouts of their structures
  // under the same names, so the functions are looked up in that object alone. kUnsupported, with the reason, if there
  // is no such library with the interface of version 6.2 or 8.0.
  static Result<const JpegLibrary*> find(const std::string& path);

  virtual std::unique_ptr<JpegDecoder> make_decoder() const = 0;
};

}  // namespace penstock::image
