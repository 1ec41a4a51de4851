// SPDX-License-Identifier: Apache-2.0
// The kernels of csrc/image for penstock.images. A decoder's memory is reused within a thread.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/extension.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "bindings/python_bytes.h"
#include "bindings/raise.h"
#include "image/make_image.h"

namespace py = pybind11;

namespace penstock::bindings {
namespace {

using image::ImageMaker;
using Box = std::array<int, 4>;  // left, top, width, height

// A `penstock.images.Chain` of Pillow's calls: the window of the file's image; width, height and filter of a resize;
// the window of the result; whether its columns and its rows are reversed at the end; its further steps, each a name
// and arguments; and its mode, "RGB" or "L".
using Steps = std::vector<std::tuple<std::string, py::object>>;
using Chain = std::tuple<Box, std::optional<std::vector<double>>, Box, bool, bool, Steps, std::string>;

image::Window window_of(const Box& box) { return {.left = box[0], .top = box[1], .width = box[2], .height = box[3]}; }

// Width, height and filter, and the left, top, right and bottom of a part unless it is the whole image.
image::Resize resize_of(const std::vector<double>& resize, bool is_by_shrinkage) {
  if (resize.size() != 3 && resize.size() != 7) throw py::value_error("resize must be 3 or 7 numbers");
  const int width = static_cast<int>(resize[0]);
  const int height = static_cast<int>(resize[1]);
  const int filter = static_cast<int>(resize[2]);
  if (width < 1 || height < 1 || filter < static_cast<int>(image::Filter::kLanczos) ||
      filter > static_cast<int>(image::Filter::kHamming))
    throw py::value_error("resize must be a size of 1 or more and a filter from 1 to 5");
  image::Resize made{.width = width,
                     .height = height,
                     .filter = static_cast<image::Filter>(filter),
                     .order = is_by_shrinkage ? image::PassOrder::kByShrinkage : image::PassOrder::kColumnsFirst};
  if (resize.size() == 7) {
    made.box.emplace();
    std::transform(resize.begin() + 3, resize.end(), made.box->begin(),
                   [](double one) { return static_cast<float>(one); });
  }
  return made;
}

image::Blend blend_of(image::BlendBase base, const py::object& factor) {
  const auto value = factor.cast<double>();
  if (!(std::abs(value) <= image::kBlendFactorMax)) throw py::value_error("factor must be from -1e6 to 1e6");
  return {.base = base, .factor = static_cast<float>(value)};
}

image::Table table_of(const py::bytes& table) {
  const auto bytes = bytes_of(table);
  image::Table made;
  if (bytes.size() != made.bytes.size()) throw py::value_error("table must be 768 bytes");
  std::memcpy(made.bytes.data(), bytes.data(), bytes.size());
  return made;
}

image::Padding padding_of(const std::array<int, 7>& numbers) {
  const auto [left, top, right, bottom, r, g, b] = numbers;
  if (std::min({left, top, right, bottom}) < 0) throw py::value_error("padding must be 0 or more");
  return {.left = left,
          .top = top,
          .right = right,
          .bottom = bottom,
          .colour = {static_cast<uint8_t>(r), static_cast<uint8_t>(g), static_cast<uint8_t>(b)}};
}

image::Step step_of(const std::string& name, const py::object& argument, bool is_by_shrinkage) {
  if (name == "brightness") return blend_of(image::BlendBase::kBlack, argument);
  if (name == "contrast") return blend_of(image::BlendBase::kMean, argument);
  if (name == "saturation") return blend_of(image::BlendBase::kGray, argument);
  if (name == "gray") return image::Gray{};
  if (name == "hue") return image::HueShift{.shift = argument.cast<uint8_t>()};
  if (name == "table") return table_of(argument.cast<py::bytes>());
  if (name == "crop") return window_of(argument.cast<Box>());
  if (name == "pad") return padding_of(argument.cast<std::array<int, 7>>());
  if (name == "resize") return resize_of(argument.cast<std::vector<double>>(), is_by_shrinkage);
  if (name == "flip") {
    const auto [columns, rows] = argument.cast<std::array<bool, 2>>();
    return image::Flip{.columns = columns, .rows = rows};
  }
  throw py::value_error("unknown step " + name);
}

image::ImageSpec spec_of(const Chain& chain, bool is_by_shrinkage) {
  const auto& [window, resize, crop, flips_columns, flips_rows, steps, mode] = chain;
  image::ImageSpec spec{.decoded = window_of(window),
                        .crop = window_of(crop),
                        .flips_columns = flips_columns,
                        .flips_rows = flips_rows,
                        .is_gray = mode == "L"};
  if (resize) spec.resize = resize_of(*resize, is_by_shrinkage);
  for (const auto& [name, argument] : steps) spec.steps.push_back(step_of(name, argument, is_by_shrinkage));
  return spec;
}

// A library of this process, with a maker for each thread that uses it.
class Library {
 public:
  explicit Library(const std::string& path) : library_(unwrap(image::JpegLibrary::find(path))) {}

  ImageMaker& maker() const {
    thread_local std::unordered_map<const image::JpegLibrary*, ImageMaker> makers;
    return makers.try_emplace(library_, *library_).first->second;
  }

 private:
  const image::JpegLibrary* library_;
};

using Opened = std::optional<std::tuple<int, int, int, int64_t>>;  // width, height, channels, number

Opened open_bytes(const Library& library, const py::bytes& file) {
  const auto bytes = bytes_of(file);
  const auto opened = without_gil([&] { return library.maker().open(bytes); });
  if (!opened) return std::nullopt;
  const auto& [header, number] = opened.value();
  return std::tuple(header.size.width, header.size.height, header.channels, number);
}

// The size of the result is known once it is made.
py::object make_bytes(const Library& library, const py::bytes& file, int64_t number, const Chain& chain,
                      bool is_by_shrinkage) {
  const auto spec = spec_of(chain, is_by_shrinkage);
  const auto bytes = bytes_of(file);
  ImageMaker& maker = library.maker();
  if (!without_gil([&] { return maker.make(bytes, number, spec); })) return py::none();
  const auto [width, height] = maker.size();
  const auto count = static_cast<py::ssize_t>(width) * height * spec.channels();
  auto made = py::reinterpret_steal<py::object>(PyBytes_FromStringAndSize(nullptr, count));
  if (!made) throw py::error_already_set();
  auto* const output = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(made.ptr()));
  without_gil([&] {
    maker.write_bytes(output);
    return true;  // rather than nothing, which it cannot pass on
  });
  return made;
}

std::optional<at::Tensor> make_planes(const Library& library, const py::bytes& file, int64_t number, const Chain& chain,
                                      bool is_by_shrinkage, const at::Tensor& tables) {
  const auto spec = spec_of(chain, is_by_shrinkage);
  if (!tables.is_cpu() || tables.scalar_type() != at::kFloat || !tables.is_contiguous() ||
      tables.numel() != image::kTableSize)
    throw py::value_error("tables must be a contiguous float32 tensor of 3 x 256 numbers on the CPU");
  const auto bytes = bytes_of(file);
  return without_gil([&]() -> std::optional<at::Tensor> {
    ImageMaker& maker = library.maker();
    if (auto done = maker.make(bytes, number, spec); !done) return std::nullopt;
    const auto [width, height] = maker.size();
    at::Tensor planes = at::empty({3, height, width}, at::kFloat);
    const std::span<const float, image::kTableSize> values(tables.const_data_ptr<float>(), image::kTableSize);
    maker.write_planes(values, planes.mutable_data_ptr<float>());
    return planes;
  });
}

}  // namespace

void bind_image(py::module_& module) {
  module.def("set_avx2_for_test", &image::set_avx2_for_test, py::arg("is_used"));
  py::class_<Library>(module, "JpegLibrary")
      .def(py::init<std::string>(), py::arg("path"))
      .def("open_bytes", &open_bytes, py::arg("file"))
      .def("make_bytes", &make_bytes, py::arg("file"), py::arg("number"), py::arg("chain"), py::arg("is_by_shrinkage"))
      .def("make_planes", &make_planes, py::arg("file"), py::arg("number"), py::arg("chain"),
           py::arg("is_by_shrinkage"), py::arg("tables"));
}

}  // namespace penstock::bindings
