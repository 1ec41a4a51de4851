// SPDX-License-Identifier: Apache-2.0
#include "photographs.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randint.h>
// jpeglib.h needs these two first.
#include <cstddef>
#include <cstdio>
#include <jpeglib.h>

#include <algorithm>
#include <memory>
#include <stdexcept>

namespace {

[[noreturn]] void raise_jpeg_error(j_common_ptr decoder) {
  char text[JMSG_LENGTH_MAX];
  decoder->err->format_message(decoder, text);
  throw std::runtime_error(text);
}

// The pixels of a JPEG file as uint8, 3 x height x width. libjpeg-turbo decodes: it is what torchvision decodes with, so
// the pixels are the same, and LibTorch has no decoder of its own.
at::Tensor decode(const std::filesystem::path& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (!file) throw std::runtime_error("cannot open " + path.string());
  jpeg_error_mgr errors;
  jpeg_decompress_struct decoder;
  decoder.err = jpeg_std_error(&errors);
  errors.error_exit = &raise_jpeg_error;
  jpeg_create_decompress(&decoder);
  const std::unique_ptr<jpeg_decompress_struct, void (*)(j_decompress_ptr)> ends(&decoder, &jpeg_destroy_decompress);
  jpeg_stdio_src(&decoder, file.get());
  jpeg_read_header(&decoder, TRUE);
  decoder.out_color_space = JCS_RGB;
  jpeg_start_decompress(&decoder);
  at::Tensor pixels = at::empty({decoder.output_height, decoder.output_width, 3}, at::kByte);
  while (decoder.output_scanline < decoder.output_height) {
    JSAMPROW row = pixels.data_ptr<uint8_t>() + size_t{decoder.output_scanline} * decoder.output_width * 3;
    jpeg_read_scanlines(&decoder, &row, 1);
  }
  jpeg_finish_decompress(&decoder);
  return pixels.permute({2, 0, 1});
}

}  // namespace

Photographs::Photographs(const std::filesystem::path& folder, int64_t side) : side_(side) {
  std::vector<std::filesystem::path> classes;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    if (entry.is_directory()) classes.push_back(entry.path());
  std::sort(classes.begin(), classes.end());
  for (size_t label = 0; label < classes.size(); ++label) {
    const size_t first = files_.size();
    for (const auto& entry : std::filesystem::directory_iterator(classes[label]))
      files_.push_back({entry.path(), static_cast<int64_t>(label)});
    std::sort(files_.begin() + static_cast<int64_t>(first), files_.end(),
              [](const File& left, const File& right) { return left.path < right.path; });
  }
}

penstock::Value Photographs::get(int64_t index, penstock::Draws& draws) {
  const File& file = files_.at(static_cast<size_t>(index));
  at::Tensor image = decode(file.path);
  at::Generator& generator = draws.batch_generator();  // as torchvision, which draws from torch's default generator
  const auto place = [&](int64_t room) { return at::randint(room + 1, {}, generator).item<int64_t>(); };
  const int64_t top = image.size(1) > side_ ? place(image.size(1) - side_) : 0;
  const int64_t left = image.size(2) > side_ ? place(image.size(2) - side_) : 0;
  image = image.narrow(1, top, side_).narrow(2, left, side_);
  if (at::rand({1}, generator).item<float>() < 0.5) image = image.flip(-1);
  return penstock::to_value(Photograph{image, file.label});
}
