// SPDX-License-Identifier: Apache-2.0
// The kernels of csrc/image for penstock.images. A decoder's memory is reused within a thread.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/extension.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>

#include "bindings/python_bytes.h"
#include "bindings/raise.h"
#include "image/make_image.h"

namespace py = pybind11;

namespace penstock::bindings {
namespace {

using image::ImageMaker;
using Box = std::array<int, 4>;  // left, top, width, height

// A `penstock.images.Chain` of Pillow's calls: the window of the file's image; width, height and filter of a resize;
// the window of the result; and whether its columns and its rows are reversed.
using Chain = std::tuple<Box, std::optional<std::array<int, 3>>, Box, bool, bool>;

image::Window window_of(const Box& box) { return {.left = box[0], .top = box[1], .width = box[2], .height = box[3]}; }

image::ImageSpec spec_of(const Chain& chain, bool is_by_shrinkage) {
  const auto& [window, resize, crop, flips_columns, flips_rows] = chain;
  image::ImageSpec spec{
      .decoded = window_of(window), .crop = window_of(crop), .flips_columns = flips_columns, .flips_rows = flips_rows};
  if (resize) {
    const auto [width, height, filter] = *resize;
    if (width < 1 || height < 1 || filter < static_cast<int>(image::Filter::kLanczos) ||
        filter > static_cast<int>(image::Filter::kHamming))
      throw py::value_error("resize must be a size of 1 or more and a filter from 1 to 5");
    spec.resize =
        image::Resize{.width = width,
                      .height = height,
                      .filter = static_cast<image::Filter>(filter),
                      .order = is_by_shrinkage ? image::PassOrder::kByShrinkage : image::PassOrder::kColumnsFirst};
  }
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

py::object make_bytes(const Library& library, const py::bytes& file, int64_t number, const Chain& chain,
                      bool is_by_shrinkage) {
  const auto spec = spec_of(chain, is_by_shrinkage);
  const auto bytes = bytes_of(file);
  const size_t count = size_t{3} * static_cast<size_t>(spec.crop.width) * static_cast<size_t>(spec.crop.height);
  auto made = py::reinterpret_steal<py::object>(PyBytes_FromStringAndSize(nullptr, static_cast<py::ssize_t>(count)));
  if (!made) throw py::error_already_set();
  auto* const output = reinterpret_cast<uint8_t*>(PyBytes_AS_STRING(made.ptr()));
  const auto result = without_gil([&] {
    auto done = library.maker().make(bytes, number, spec);
    if (done) library.maker().write_bytes(output);
    return done;
  });
  return result ? made : py::none();
}

std::optional<at::Tensor> make_planes(const Library& library, const py::bytes& file, int64_t number, const Chain& chain,
                                      bool is_by_shrinkage, const at::Tensor& tables) {
  const auto spec = spec_of(chain, is_by_shrinkage);
  if (!tables.is_cpu() || tables.scalar_type() != at::kFloat || !tables.is_contiguous() ||
      tables.numel() != image::kTableSize)
    throw py::value_error("tables must be a contiguous float32 tensor of 3 x 256 numbers on the CPU");
  const auto bytes = bytes_of(file);
  return without_gil([&]() -> std::optional<at::Tensor> {
    if (auto done = library.maker().make(bytes, number, spec); !done) return std::nullopt;
    at::Tensor planes = at::empty({3, spec.crop.height, spec.crop.width}, at::kFloat);
    const std::span<const float, image::kTableSize> values(tables.const_data_ptr<float>(), image::kTableSize);
    library.maker().write_planes(values, planes.mutable_data_ptr<float>());
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
