// SPDX-License-Identifier: Apache-2.0
#pragma once
// The decoder for one layout of libjpeg-turbo's structures. The including file defines JPEG_LIB_VERSION, 62 or 80, and
// PENSTOCK_OPEN_JPEG_LAYOUT, the name of its function.

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <string_view>
#include <vector>

#include "image/jpeg_layout.h"

// In the place of the jconfig.h of this system, which has one layout.
#define JCONFIG_INCLUDED
#define C_ARITH_CODING_SUPPORTED 1
#define D_ARITH_CODING_SUPPORTED 1
#define MEM_SRCDST_SUPPORTED 1
#define BITS_IN_JSAMPLE 8
#include <jpeglib.h>

namespace penstock::image {
namespace {

// Decoded around the window, because smooth upsampling and the DCT's blocks reach beyond it.
constexpr int kMargin = 16;

constexpr uint8_t kMarker = 0xff;
constexpr uint8_t kEndOfImage = 0xd9;
constexpr uint8_t kRestartFirst = 0xd0;
constexpr uint8_t kRestartLast = 0xd7;
// The segments that may stand between the scans of an image.
constexpr std::array<uint8_t, 5> kSegments = {0xc4 /* DHT */, 0xda /* SOS */, 0xdb /* DQT */, 0xdd /* DRI */,
                                              0xfe /* COM */};

// Whether entropy-coded data, with further scans if there are any, are complete up to the end of the image. Pillow
// raises an exception about a file that ends before, even if the part after its end is not needed here.
bool has_regular_end(std::span<const uint8_t> data) {
  for (size_t i = 0; i + 1 < data.size();) {
    const void* found = std::memchr(data.data() + i, kMarker, data.size() - i - 1);
    if (found == nullptr) return false;
    i = static_cast<size_t>(static_cast<const uint8_t*>(found) - data.data());
    const uint8_t code = data[i + 1];
    if (code == kEndOfImage) return true;
    if (code == kMarker) {  // a fill byte
      ++i;
    } else if (code == 0 || (code >= kRestartFirst && code <= kRestartLast)) {
      i += 2;
    } else {
      if (std::find(kSegments.begin(), kSegments.end(), code) == kSegments.end() || i + 3 >= data.size()) return false;
      i += 2 + (static_cast<size_t>(data[i + 2]) << 8 | data[i + 3]);
    }
  }
  return false;
}

struct Errors : jpeg_error_mgr {
  std::jmp_buf jump;
  std::array<char, JMSG_LENGTH_MAX> text{};
};

[[noreturn]] void leave(j_common_ptr info) {
  auto* errors = static_cast<Errors*>(info->err);
  errors->format_message(info, errors->text.data());
  std::longjmp(errors->jump, 1);  // NOLINT: libjpeg's way; only C frames and plain objects are left
}

void ignore_message(j_common_ptr) {}

// The functions of libjpeg that are called here.
struct Library {
  decltype(&jpeg_std_error) std_error = nullptr;
  decltype(&jpeg_CreateDecompress) create = nullptr;
  decltype(&jpeg_destroy_decompress) destroy = nullptr;
  decltype(&jpeg_abort_decompress) abort = nullptr;
  decltype(&jpeg_mem_src) mem_src = nullptr;
  decltype(&jpeg_save_markers) save_markers = nullptr;
  decltype(&jpeg_read_header) read_header = nullptr;
  decltype(&jpeg_start_decompress) start = nullptr;
  decltype(&jpeg_crop_scanline) crop_scanline = nullptr;
  decltype(&jpeg_skip_scanlines) skip_scanlines = nullptr;
  decltype(&jpeg_read_scanlines) read_scanlines = nullptr;
};

template <typename Function>
bool look_up(void* object, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(object, name));
  return function != nullptr;
}

// Whether the library takes our structures: it compares its version and their size with ours.
bool accepts_our_layout(const Library& found) {
  jpeg_decompress_struct info{};
  Errors errors{};
  info.err = found.std_error(&errors);
  errors.error_exit = leave;
  errors.output_message = ignore_message;
  if (setjmp(errors.jump) != 0) return false;  // NOLINT
  found.create(&info, JPEG_LIB_VERSION, sizeof info);
  found.destroy(&info);
  return true;
}

Fault damaged(std::string_view how) {
  return {Errc::kUnsupported, "the JPEG file is left to its library: " + std::string(how)};
}

// The markers that precede an image which Pillow decodes as it is. APP2 may also mark a file of several images.
bool has_usual_markers(const jpeg_decompress_struct& info) {
  for (const jpeg_marker_struct* marker = info.marker_list; marker != nullptr; marker = marker->next) {
    if (marker->marker != JPEG_APP0 + 2) continue;
    const std::string_view head(reinterpret_cast<const char*>(marker->data), std::min(marker->data_length, 11U));
    if (head != "ICC_PROFILE") return false;
  }
  return true;
}

class JpegDecoder final : public Decoder {
 public:
  explicit JpegDecoder(const Library& jpeg) : jpeg_(jpeg) {
    info_.err = jpeg_.std_error(&errors_);
    errors_.error_exit = leave;
    errors_.output_message = ignore_message;
    jpeg_.create(&info_, JPEG_LIB_VERSION, sizeof info_);
  }
  ~JpegDecoder() override { jpeg_.destroy(&info_); }

  Result<ImageHeader> open(std::span<const std::byte> file) override;
  Result<Pixels> decode(const Window& window) override;

 private:
  // Restricts the rows to the columns of a window and its margin, which are `*left` and `*width` then.
  void restrict_columns(const Window& window, JDIMENSION* left, JDIMENSION* width);
  static JDIMENSION top_of(const Window& window) { return static_cast<JDIMENSION>(std::max(0, window.top - kMargin)); }
  JDIMENSION bottom_of(const Window& window) const {
    return std::min(info_.output_height, static_cast<JDIMENSION>(window.top + window.height + kMargin));
  }
  // Decodes the rows [top, bottom) into memory from `first` on. An empty text means success.
  const char* read_rows(JDIMENSION top, JDIMENSION bottom, uint8_t* first, size_t stride);

  const Library jpeg_;
  jpeg_decompress_struct info_{};
  Errors errors_{};
  std::vector<uint8_t> pixels_;
};

Result<ImageHeader> JpegDecoder::open(std::span<const std::byte> file) {
  jpeg_decompress_struct& info = info_;
  // Everything that is changed between setjmp and longjmp belongs to the decoder.
  if (setjmp(errors_.jump) != 0) return damaged(errors_.text.data());  // NOLINT
  jpeg_.abort(&info);
  errors_.num_warnings = 0;
  jpeg_.mem_src(&info, reinterpret_cast<const uint8_t*>(file.data()), static_cast<unsigned long>(file.size()));
  jpeg_.save_markers(&info, JPEG_APP0 + 2, 16);
  if (jpeg_.read_header(&info, TRUE) != JPEG_HEADER_OK) return damaged("it has no image");
  const bool is_gray = info.num_components == 1 && info.jpeg_color_space == JCS_GRAYSCALE;
  const bool is_colour =
      info.num_components == 3 && (info.jpeg_color_space == JCS_YCbCr || info.jpeg_color_space == JCS_RGB);
  if (!is_gray && !is_colour) return damaged("its pixels are neither gray nor of three colours");
  if (info.data_precision != 8) return damaged("its samples do not have 8 bits");
  if (info.arith_code) return damaged("it is coded arithmetically");
  if (!has_usual_markers(info)) return damaged("it may contain several images");
  if (errors_.num_warnings != 0) return damaged("its header is damaged");
  if (!has_regular_end({info.src->next_input_byte, info.src->bytes_in_buffer})) return damaged("it ends early");
  info.out_color_space = JCS_EXT_RGBX;
  info.dct_method = JDCT_ISLOW;
  info.do_fancy_upsampling = TRUE;
  jpeg_.start(&info);
  if (errors_.num_warnings != 0) return damaged("its data are damaged");
  return ImageHeader{
      .size = {.width = static_cast<int>(info.output_width), .height = static_cast<int>(info.output_height)},
      .channels = info.num_components};
}

void JpegDecoder::restrict_columns(const Window& window, JDIMENSION* left, JDIMENSION* width) {
  *left = static_cast<JDIMENSION>(std::max(0, window.left - kMargin));
  const int right = std::min(static_cast<int>(info_.output_width), window.left + window.width + kMargin);
  *width = static_cast<JDIMENSION>(right) - *left;
  if (*width < info_.output_width) jpeg_.crop_scanline(&info_, left, width);
}

const char* JpegDecoder::read_rows(JDIMENSION top, JDIMENSION bottom, uint8_t* first, size_t stride) {
  if (top > 0 && jpeg_.skip_scanlines(&info_, top) != top) return "it ends early";
  while (info_.output_scanline < bottom) {
    std::array<JSAMPROW, 16> rows{};
    const JDIMENSION row = info_.output_scanline - top;
    const JDIMENSION count = std::min(static_cast<JDIMENSION>(rows.size()), bottom - info_.output_scanline);
    for (JDIMENSION i = 0; i < count; ++i) rows[i] = first + stride * (row + i);
    if (jpeg_.read_scanlines(&info_, rows.data(), count) == 0) return "it ends early";
  }
  if (errors_.num_warnings != 0) return "its data are damaged";
  jpeg_.abort(&info_);
  return "";
}

Result<Pixels> JpegDecoder::decode(const Window& window) {
  if (setjmp(errors_.jump) != 0) return damaged(errors_.text.data());  // NOLINT
  JDIMENSION left = 0;
  JDIMENSION width = 0;
  restrict_columns(window, &left, &width);
  const JDIMENSION top = top_of(window);
  const size_t stride = static_cast<size_t>(width) * kPixelBytes;
  pixels_.resize(stride * (bottom_of(window) - top) + kSpareBytes);
  if (const char* why = read_rows(top, bottom_of(window), pixels_.data(), stride); *why != '\0') return damaged(why);
  const size_t from_left = static_cast<size_t>(window.left) - left;
  const size_t from_top = static_cast<size_t>(window.top) - top;
  return Pixels{.data = pixels_.data() + stride * from_top + from_left * kPixelBytes,
                .width = window.width,
                .height = window.height,
                .stride = static_cast<ptrdiff_t>(stride)};
}

class LibraryOfLayout final : public JpegLibrary {
 public:
  explicit LibraryOfLayout(const Library& functions) : functions_(functions) {}
  std::unique_ptr<Decoder> make_decoder() const override { return std::make_unique<JpegDecoder>(functions_); }

 private:
  const Library functions_;
};

}  // namespace

std::unique_ptr<const JpegLibrary> PENSTOCK_OPEN_JPEG_LAYOUT(void* object) {
  Library found;
  const bool has_all =
      look_up(object, "jpeg_std_error", found.std_error) && look_up(object, "jpeg_CreateDecompress", found.create) &&
      look_up(object, "jpeg_destroy_decompress", found.destroy) &&
      look_up(object, "jpeg_abort_decompress", found.abort) && look_up(object, "jpeg_mem_src", found.mem_src) &&
      look_up(object, "jpeg_save_markers", found.save_markers) &&
      look_up(object, "jpeg_read_header", found.read_header) && look_up(object, "jpeg_start_decompress", found.start) &&
      look_up(object, "jpeg_crop_scanline", found.crop_scanline) &&
      look_up(object, "jpeg_skip_scanlines", found.skip_scanlines) &&
      look_up(object, "jpeg_read_scanlines", found.read_scanlines);
  if (!has_all || !accepts_our_layout(found)) return nullptr;
  return std::make_unique<LibraryOfLayout>(found);
}

}  // namespace penstock::image
