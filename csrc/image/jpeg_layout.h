// SPDX-License-Identifier: Apache-2.0
#pragma once
// The layouts of libjpeg-turbo's structures: version 6.2 of the interface (Pillow's wheels, Debian) and version 8.0
// (the Pillow of Ubuntu and of conda-forge). The same code, jpeg_decoder.h, is compiled for each.

#include <memory>

#include "image/jpeg.h"

namespace penstock::image {

// Null if the shared object `object`, of dlopen, has no libjpeg-turbo with this layout.
std::unique_ptr<const JpegLibrary> open_jpeg_layout_62(void* object);
std::unique_ptr<const JpegLibrary> open_jpeg_layout_80(void* object);

}  // namespace penstock::image
