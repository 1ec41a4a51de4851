// SPDX-License-Identifier: Apache-2.0
#define JPEG_LIB_VERSION 80
#define PENSTOCK_OPEN_JPEG_LAYOUT open_jpeg_layout_80
#include "image/jpeg_decoder.h"
