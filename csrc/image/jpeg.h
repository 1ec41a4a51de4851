// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decodes a part of a JPEG file by the copy of libjpeg-turbo that Pillow is linked with, with the pixels that Pillow
// has there: by the accurate integer DCT and smooth upsampling, the library's defaults. Files that it might treat
// differently are refused: Pillow decodes them, or raises an exception about them.

#include <memory>
#include <string>

#include "base/result.h"
#include "image/decoder.h"

namespace penstock::image {

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

  // Its open() reads files with several scans to their end, and leaves those to Pillow that are not one complete image
  // of 8-bit YCbCr, RGB or gray pixels with the usual markers.
  virtual std::unique_ptr<Decoder> make_decoder() const = 0;
};

}  // namespace penstock::image
