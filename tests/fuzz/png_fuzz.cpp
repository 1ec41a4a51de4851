// SPDX-License-Identifier: Apache-2.0
// PNG files of a data set, as a worker reads them.
#include <libdeflate.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string_view>

#include "fuzz_target.h"
#include "image/png.h"

namespace penstock::fuzz {

namespace {

constexpr size_t kRowBytesMax = 4096;  // of a file that is changed
constexpr uint8_t kPalette = 3;

struct Parts {
  uint32_t width = 0;
  uint32_t height = 0;
  uint8_t depth = 8;
  uint8_t colour = 2;
  uint8_t interlace = 0;
  Bytes palette;
  Bytes rows;
};

size_t bytes_per_pixel(uint8_t colour) { return colour == 2 ? 3 : colour == 6 ? 4 : 1; }
size_t bytes_of_rows(const Parts& parts) {
  return size_t{parts.height} * (1 + parts.width * bytes_per_pixel(parts.colour));
}

void put_number(Bytes& bytes, uint32_t number) {
  for (int shift = 24; shift >= 0; shift -= 8) bytes.push_back(static_cast<std::byte>(number >> shift & 0xff));
}

uint32_t number_at(const Bytes& bytes, size_t place) {
  uint32_t number = 0;
  for (size_t i = 0; i < 4; ++i) number = number << 8 | static_cast<uint32_t>(bytes[place + i]);
  return number;
}

void put_chunk(Bytes& bytes, std::string_view type, std::span<const std::byte> data) {
  put_number(bytes, static_cast<uint32_t>(data.size()));
  const size_t start = bytes.size();
  for (const char letter : type) bytes.push_back(static_cast<std::byte>(letter));
  bytes.insert(bytes.end(), data.begin(), data.end());
  put_number(bytes, libdeflate_crc32(0, bytes.data() + start, bytes.size() - start));
}

// A file whose compressed rows are divided into `part_count` chunks.
Bytes write(const Parts& parts, size_t part_count) {
  Bytes bytes;
  for (const char one : std::string_view("\x89PNG\r\n\x1a\n")) bytes.push_back(static_cast<std::byte>(one));
  Bytes header;
  put_number(header, parts.width);
  put_number(header, parts.height);
  for (const uint8_t one : {parts.depth, parts.colour, uint8_t{0}, uint8_t{0}, parts.interlace})
    header.push_back(std::byte{one});
  put_chunk(bytes, "IHDR", header);
  if (!parts.palette.empty()) put_chunk(bytes, "PLTE", parts.palette);
  const std::unique_ptr<libdeflate_compressor, void (*)(libdeflate_compressor*)> compressor(
      libdeflate_alloc_compressor(1), libdeflate_free_compressor);
  Bytes packed(libdeflate_zlib_compress_bound(compressor.get(), parts.rows.size()));
  packed.resize(
      libdeflate_zlib_compress(compressor.get(), parts.rows.data(), parts.rows.size(), packed.data(), packed.size()));
  std::span<const std::byte> rest(packed);
  for (size_t part = 0; part < part_count; ++part) {
    const size_t size = part + 1 == part_count ? rest.size() : rest.size() / 2;
    put_chunk(bytes, "IDAT", rest.first(size));
    rest = rest.subspan(size);
  }
  put_chunk(bytes, "IEND", {});
  return bytes;
}

// What can be read of a file that write() made.
Parts read(const Bytes& bytes) {
  Parts parts;
  Bytes packed;
  for (size_t place = 8; place + 12 <= bytes.size();) {
    const size_t length = number_at(bytes, place);
    if (length > bytes.size() - place - 12) break;
    const std::string_view type(reinterpret_cast<const char*>(&bytes[place + 4]), 4);
    const auto data = std::span(bytes).subspan(place + 8, length);
    if (type == "IHDR" && length == 13) {
      parts.width = number_at(bytes, place + 8);
      parts.height = number_at(bytes, place + 12);
      parts.depth = static_cast<uint8_t>(data[8]);
      parts.colour = static_cast<uint8_t>(data[9]);
      parts.interlace = static_cast<uint8_t>(data[12]);
    } else if (type == "PLTE") {
      parts.palette.assign(data.begin(), data.end());
    } else if (type == "IDAT") {
      packed.insert(packed.end(), data.begin(), data.end());
    }
    place += 12 + length;
  }
  const std::unique_ptr<libdeflate_decompressor, void (*)(libdeflate_decompressor*)> decompressor(
      libdeflate_alloc_decompressor(), libdeflate_free_decompressor);
  parts.rows.resize(kRowBytesMax);
  size_t made = 0;
  const bool is_done = libdeflate_zlib_decompress(decompressor.get(), packed.data(), packed.size(), parts.rows.data(),
                                                  parts.rows.size(), &made) == LIBDEFLATE_SUCCESS;
  parts.rows.resize(is_done ? made : 0);
  return parts;
}

Bytes seed(uint8_t colour, uint32_t width, uint32_t height, size_t part_count) {
  Parts parts{.width = width, .height = height, .colour = colour};
  if (colour == kPalette) parts.palette.resize(size_t{3} * 40, std::byte{7});
  parts.rows.resize(bytes_of_rows(parts));
  const size_t row_bytes = parts.rows.size() / height;
  for (size_t i = 0; i < parts.rows.size(); ++i)
    parts.rows[i] = static_cast<std::byte>(i % row_bytes == 0 ? i / row_bytes % 5 : i * 7 % 40);
  if (colour == kPalette)  // whose numbers must not be added up
    for (size_t row = 0; row < height; ++row) parts.rows[row * row_bytes] = std::byte{0};
  return write(parts, part_count);
}

}  // namespace

std::vector<Bytes> make_seeds() {
  return {seed(0, 7, 5, 1), seed(2, 9, 6, 1), seed(kPalette, 11, 5, 2), seed(6, 4, 7, 3), seed(2, 1, 1, 1)};
}

void mutate(Bytes& bytes, Choices& choices) {
  if (choices.below(8) == 0) {
    edit_at_random(bytes);
    return;
  }
  Parts parts = read(bytes);
  edit_at_random(parts.rows);
  if (choices.below(4) == 0) edit_at_random(parts.palette);
  if (choices.below(4) == 0) parts.colour = choices.one_of<uint8_t>({0, 2, kPalette, 4, 6});
  if (choices.below(4) == 0) parts.width = static_cast<uint32_t>(choices.below(20));
  if (choices.below(4) == 0) parts.height = static_cast<uint32_t>(choices.below(20));
  if (choices.mostly()) parts.depth = 8;
  if (choices.mostly()) parts.interlace = 0;
  if (parts.colour == kPalette && choices.mostly()) {
    parts.palette.resize(3 * std::clamp<size_t>(parts.palette.size() / 3, 2, 256));
    if (choices.below(2) == 0) parts.palette.resize(3 * (2 + choices.below(12)));
  } else if (parts.colour != kPalette && choices.mostly()) {
    parts.palette.clear();
  }
  parts.width = std::min(parts.width, 40U);
  parts.height = std::min(parts.height, 20U);
  if (choices.mostly()) parts.rows.resize(bytes_of_rows(parts));
  if (const size_t row_bytes = parts.height == 0 ? 0 : parts.rows.size() / parts.height;
      row_bytes > 0 && choices.mostly()) {
    for (size_t row = 0; row < parts.height; ++row)
      parts.rows[row * row_bytes] &= static_cast<std::byte>(parts.colour == kPalette ? 0 : 3);
  }
  bytes = write(parts, 1 + choices.below(3));
  if (!choices.mostly()) edit_at_random(bytes);
}

bool check(std::span<const std::byte> bytes) {
  if (!image::is_png(bytes)) return false;
  image::PngDecoder whole;
  const auto header = whole.open(bytes);
  if (!header) return is_refused(header.error().message);
  const auto [width, height] = header.value().size;
  expect(width > 0 && height > 0 && width <= image::kPngPixelsMax / height, "images have pixels, and not too many");
  const auto pixels = whole.decode({.width = width, .height = height});
  if (!pixels) return is_refused(pixels.error().message);
  // A part has the pixels of the whole image.
  const image::Window part{
      .left = width / 3, .top = height / 4, .width = width - width / 3, .height = (height + 1) / 2};
  image::PngDecoder again;
  expect(static_cast<bool>(again.open(bytes)), "a file is opened twice");
  const auto of_part = again.decode(part);
  expect(static_cast<bool>(of_part), "a part of a good file is good");
  for (int y = 0; y < part.height; ++y) {
    for (int x = 0; x < part.width; ++x) {
      expect(std::equal(of_part.value().pixel(x, y), of_part.value().pixel(x, y) + 3,
                        pixels.value().pixel(part.left + x, part.top + y)),
             "a part has the pixels of the whole image");
    }
  }
  return true;
}

}  // namespace penstock::fuzz
