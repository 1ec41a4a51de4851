// SPDX-License-Identifier: Apache-2.0
#include "image/png.h"

#include <libdeflate.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <string_view>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace penstock::image {
namespace {

constexpr std::array<uint8_t, 8> kSignature = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
constexpr size_t kChunkBytes = 12;       // of a chunk without data: its length, type and checksum
constexpr size_t kKeptBytes = 64 << 20;  // of memory that is kept for the next file
constexpr size_t kRowSpareBytes = 4;     // behind the rows, since pixels of three bytes are read as four
enum Colour : uint8_t { kGray = 0, kRgb = 2, kPalette = 3, kRgba = 6 };
enum RowFilter : uint8_t { kNone, kSub, kUp, kAverage, kPaeth, kRowFilterEnd };

Fault left_to_pillow(const char* why) {
  return {Errc::kUnsupported, std::string("the PNG file is left to Pillow: ") + why};
}

uint32_t big_endian(const uint8_t* bytes) {
  return uint32_t{bytes[0]} << 24 | uint32_t{bytes[1]} << 16 | uint32_t{bytes[2]} << 8 | bytes[3];
}

// The pixels that are before, above, and above that one are known; the rows before the first one and the pixels before
// a row are 0.
uint8_t paeth(int before, int above, int above_before) {
  const int estimate = before + above - above_before;
  const int of_before = std::abs(estimate - before);
  const int of_above = std::abs(estimate - above);
  const int of_both = std::abs(estimate - above_before);
  if (of_before <= of_above && of_before <= of_both) return static_cast<uint8_t>(before);
  return static_cast<uint8_t>(of_above <= of_both ? above : above_before);
}

void add_above(uint8_t* row, const uint8_t* above, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) row[i] = static_cast<uint8_t>(row[i] + above[i]);
}

template <size_t kBytes>
void restore_plain(uint8_t filter, uint8_t* row, const uint8_t* above, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) {
    const int before = i < kBytes ? 0 : row[i - kBytes];
    const int above_before = i < kBytes ? 0 : above[i - kBytes];
    int value = row[i];
    if (filter == kSub) value += before;
    if (filter == kAverage) value += (before + above[i]) / 2;
    if (filter == kPaeth) value += paeth(before, above[i], above_before);
    row[i] = static_cast<uint8_t>(value);
  }
}

#if defined(__SSE2__)

// One pixel at a time, its bytes as numbers of 16 bits.
__m128i pixel_at(const uint8_t* bytes) {
  int word = 0;
  std::memcpy(&word, bytes, sizeof word);
  return _mm_unpacklo_epi8(_mm_cvtsi32_si128(word), _mm_setzero_si128());
}

template <size_t kBytes>
void store_pixel(__m128i pixel, uint8_t* bytes) {
  const int word = _mm_cvtsi128_si32(_mm_packus_epi16(pixel, pixel));
  std::memcpy(bytes, &word, kBytes);
}

__m128i magnitude(__m128i numbers) { return _mm_max_epi16(numbers, _mm_sub_epi16(_mm_setzero_si128(), numbers)); }

__m128i chosen(__m128i mask, __m128i one, __m128i other) {
  return _mm_or_si128(_mm_and_si128(mask, one), _mm_andnot_si128(mask, other));
}

__m128i paeth(__m128i before, __m128i above, __m128i above_before) {
  const __m128i of_before = _mm_sub_epi16(above, above_before);
  const __m128i of_above = _mm_sub_epi16(before, above_before);
  const __m128i of_both = magnitude(_mm_add_epi16(of_before, of_above));
  const __m128i least = _mm_min_epi16(of_both, _mm_min_epi16(magnitude(of_before), magnitude(of_above)));
  const __m128i other = chosen(_mm_cmpeq_epi16(least, magnitude(of_above)), above, above_before);
  return chosen(_mm_cmpeq_epi16(least, magnitude(of_before)), before, other);
}

template <size_t kBytes, RowFilter kFilter>
void restore_row(uint8_t* row, const uint8_t* above, size_t bytes) {
  const __m128i byte = _mm_set1_epi16(0xff);
  __m128i before = _mm_setzero_si128();
  __m128i above_before = _mm_setzero_si128();
  for (size_t i = 0; i < bytes; i += kBytes) {
    __m128i estimate = before;
    if constexpr (kFilter != kSub) {
      const __m128i over = pixel_at(above + i);
      if constexpr (kFilter == kAverage) {
        estimate = _mm_srli_epi16(_mm_add_epi16(before, over), 1);
      } else {
        estimate = paeth(before, over, above_before);
        above_before = over;
      }
    }
    before = _mm_and_si128(_mm_add_epi16(pixel_at(row + i), estimate), byte);
    store_pixel<kBytes>(before, row + i);
  }
}

template <size_t kBytes>
void restore_pixels(uint8_t filter, uint8_t* row, const uint8_t* above, size_t bytes) {
  if (filter == kSub) restore_row<kBytes, kSub>(row, above, bytes);
  if (filter == kAverage) restore_row<kBytes, kAverage>(row, above, bytes);
  if (filter == kPaeth) restore_row<kBytes, kPaeth>(row, above, bytes);
}

#else

template <size_t kBytes>
void restore_pixels(uint8_t filter, uint8_t* row, const uint8_t* above, size_t bytes) {
  restore_plain<kBytes>(filter, row, above, bytes);
}

#endif

void restore(uint8_t filter, uint8_t* row, const uint8_t* above, size_t bytes, int bytes_per_pixel) {
  if (filter == kNone) return;
  if (filter == kUp) {
    add_above(row, above, bytes);
  } else if (bytes_per_pixel == 4) {
    restore_pixels<4>(filter, row, above, bytes);
  } else if (bytes_per_pixel == 3) {
    restore_pixels<3>(filter, row, above, bytes);
  } else {
    restore_plain<1>(filter, row, above, bytes);
  }
}

// Memory of `bytes` and a few more, whose content is undefined.
uint8_t* room_in(std::vector<uint8_t>& memory, size_t bytes) {
  if (memory.size() < bytes + kRowSpareBytes) memory.resize(bytes + kRowSpareBytes);
  return memory.data();
}

void keep_little(std::vector<uint8_t>& memory) {
  if (memory.size() > kKeptBytes) std::vector<uint8_t>().swap(memory);
}

}  // namespace

bool is_png(std::span<const std::byte> file) {
  return file.size() >= kSignature.size() && std::memcmp(file.data(), kSignature.data(), kSignature.size()) == 0;
}

void PngDecoder::Free::operator()(libdeflate_decompressor* one) const { libdeflate_free_decompressor(one); }

PngDecoder::PngDecoder() : decompressor_(libdeflate_alloc_decompressor()) {}
PngDecoder::~PngDecoder() = default;

Result<ImageHeader> PngDecoder::open(std::span<const std::byte> file) {
  file_ = {reinterpret_cast<const uint8_t*>(file.data()), file.size()};
  size_ = {};
  palette_.clear();
  packed_.clear();
  if (auto read = read_chunks(); !read) return read.error();
  return ImageHeader{.size = size_, .channels = bytes_per_pixel_ == 1 && palette_.empty() ? 1 : 3};
}

Result<void> PngDecoder::read_chunks() {
  constexpr auto kTransparency = std::to_array<std::string_view>({"tRNS", "acTL", "fcTL", "fdAT"});
  if (decompressor_ == nullptr) return left_to_pillow("there is no memory");
  bool has_palette = false;
  bool is_ended = false;
  for (size_t place = kSignature.size(); place < file_.size();) {
    if (is_ended) return left_to_pillow("it has data behind its end");
    if (file_.size() - place < kChunkBytes) return left_to_pillow("it is truncated");
    const uint8_t* const chunk = file_.data() + place;
    const size_t length = big_endian(chunk);
    if (length > file_.size() - place - kChunkBytes) return left_to_pillow("it is truncated");
    if (big_endian(chunk + 8 + length) != libdeflate_crc32(0, chunk + 4, 4 + length))
      return left_to_pillow("a checksum is wrong");
    const std::string_view type(reinterpret_cast<const char*>(chunk) + 4, 4);
    const std::span data(chunk + 8, length);
    place += kChunkBytes + length;
    if ((size_.width == 0) != (type == "IHDR")) return left_to_pillow("its header is not its first chunk");
    if (type == "IHDR") {
      if (auto read = read_header(data); !read) return read;
      has_palette = !palette_.empty();
    } else if (type == "IDAT") {
      packed_.push_back(data);
    } else if (type == "IEND") {
      is_ended = true;
    } else if (!packed_.empty()) {
      return left_to_pillow("it has chunks behind its pixels");
    } else if (type == "PLTE" && has_palette) {
      if (length == 0 || length % 3 != 0 || length > size_t{3} * 256) return left_to_pillow("its palette is unusual");
      palette_.assign(length / 3 * kPixelBytes, 0);
      for (size_t colour = 0; colour < length / 3; ++colour)
        std::copy_n(&data[3 * colour], 3, &palette_[kPixelBytes * colour]);
    } else if (std::find(kTransparency.begin(), kTransparency.end(), type) != kTransparency.end()) {
      return left_to_pillow("it has transparent colours, or several images");
    } else if (type[0] >= 'A' && type[0] <= 'Z' && type != "PLTE") {
      return left_to_pillow("it has an unknown chunk");
    }
  }
  if (!is_ended || packed_.empty()) return left_to_pillow("it has no pixels or no end");
  if (has_palette && palette_.size() == kPixelBytes) return left_to_pillow("its palette has one colour or none");
  return {};
}

Result<void> PngDecoder::read_header(std::span<const uint8_t> data) {
  if (data.size() != 13) return left_to_pillow("its header is unusual");
  const uint32_t width = big_endian(&data[0]);
  const uint32_t height = big_endian(&data[4]);
  if (width == 0 || height == 0 || width > kPngPixelsMax || height > kPngPixelsMax / width)
    return left_to_pillow("it has too many pixels or none");
  const uint8_t depth = data[8];
  const uint8_t colour = data[9];
  if (depth != 8 || data[10] != 0 || data[11] != 0 || data[12] != 0)
    return left_to_pillow("it has other pixels than of 8 bits, or they are interlaced");
  switch (colour) {
    case kGray: bytes_per_pixel_ = 1; break;
    case kRgb: bytes_per_pixel_ = 3; break;
    case kRgba: bytes_per_pixel_ = 4; break;
    case kPalette:
      bytes_per_pixel_ = 1;
      palette_.assign(kPixelBytes, 0);  // until its chunk
      break;
    default: return left_to_pillow("it has gray pixels with transparency, or unknown ones");
  }
  size_ = {.width = static_cast<int>(width), .height = static_cast<int>(height)};
  return {};
}

Result<void> PngDecoder::decompress() {
  size_t packed_bytes = 0;
  for (const auto& part : packed_) packed_bytes += part.size();
  const uint8_t* packed = packed_.front().data();
  if (packed_.size() > 1) {
    uint8_t* next = room_in(joined_, packed_bytes);
    packed = next;
    for (const auto& part : packed_) next = std::copy(part.begin(), part.end(), next);
  }
  const size_t row_bytes = 1 + static_cast<size_t>(size_.width) * static_cast<size_t>(bytes_per_pixel_);
  const size_t bytes = row_bytes * static_cast<size_t>(size_.height);
  size_t read_bytes = 0;
  size_t made_bytes = 0;
  const auto outcome = libdeflate_zlib_decompress_ex(decompressor_.get(), packed, packed_bytes, room_in(rows_, bytes),
                                                     bytes, &read_bytes, &made_bytes);
  keep_little(joined_);
  if (outcome != LIBDEFLATE_SUCCESS || read_bytes != packed_bytes || made_bytes != bytes)
    return left_to_pillow("its pixels are damaged, or more or fewer than its header says");
  for (size_t row = 0; row < bytes; row += row_bytes)
    if (rows_[row] >= kRowFilterEnd) return left_to_pillow("a row has an unknown filter");
  return {};
}

Result<Pixels> PngDecoder::decode(const Window& window) {
  if (auto done = decompress(); !done) return done.error();
  const size_t row_bytes = static_cast<size_t>(size_.width) * static_cast<size_t>(bytes_per_pixel_);
  const std::vector<uint8_t> before_first(row_bytes + kRowSpareBytes);
  const ptrdiff_t stride = static_cast<ptrdiff_t>(window.width) * kPixelBytes;
  uint8_t* const pixels =
      room_in(pixels_, static_cast<size_t>(stride) * static_cast<size_t>(window.height) + kSpareBytes);
  const uint8_t* above = before_first.data();
  for (int y = 0; y < window.top + window.height; ++y) {
    uint8_t* const row = rows_.data() + static_cast<size_t>(y) * (1 + row_bytes) + 1;
    restore(row[-1], row, above, row_bytes, bytes_per_pixel_);
    above = row;
    if (y >= window.top && !convert(row, window, pixels + (y - window.top) * stride))
      return left_to_pillow("a pixel has no colour in the palette");
  }
  keep_little(rows_);
  return Pixels{.data = pixels, .width = window.width, .height = window.height, .stride = stride};
}

// Converts a row's pixels within the window. False if one has no colour.
bool PngDecoder::convert(const uint8_t* row, const Window& window, uint8_t* pixels) const {
  const auto left = static_cast<size_t>(window.left);
  const auto width = static_cast<size_t>(window.width);
  if (bytes_per_pixel_ == 4) {
    std::copy_n(row + left * 4, width * 4, pixels);
  } else if (bytes_per_pixel_ == 3) {
    for (size_t x = 0; x < width; ++x) std::memcpy(pixels + x * kPixelBytes, row + (left + x) * 3, kPixelBytes);
  } else if (palette_.empty()) {
    for (size_t x = 0; x < width; ++x) std::fill_n(pixels + x * kPixelBytes, kPixelBytes, row[left + x]);
  } else {
    for (size_t x = 0; x < width; ++x) {
      const size_t place = size_t{row[left + x]} * kPixelBytes;
      if (place >= palette_.size()) return false;
      std::memcpy(pixels + x * kPixelBytes, &palette_[place], kPixelBytes);
    }
  }
  return true;
}

}  // namespace penstock::image
