// SPDX-License-Identifier: Apache-2.0
#define JPEG_LIB_VERSION 62
#define PENSTOCK_OPEN_JPEG_LAYOUT open_jpeg_layout_62
#include "image/jpeg_decoder.h"
