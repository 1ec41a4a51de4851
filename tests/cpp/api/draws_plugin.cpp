// SPDX-License-Identifier: Apache-2.0
// A plug-in for the tests: the datasets of draw_datasets.h, and some that fail.

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <tuple>

#include "draw_datasets.h"

PENSTOCK_DATASET(draw, [](const penstock::Value& arguments) {
  const penstock::Value* delay_ms = arguments.find("delay_ms");
  return Draw(arguments["size"].integer(), delay_ms == nullptr ? 0 : delay_ms->integer());
})
PENSTOCK_DATASET(draw_stream, [](const penstock::Value& arguments) { return DrawStream(arguments["size"].integer()); })
// Counts the samples that it has made, in the place of their indices.
PENSTOCK_DATASET(counting, [](const penstock::Value& arguments) {
  return penstock::make_dataset(arguments["size"].integer(), [count = int64_t{0}](int64_t) mutable {
    return std::tuple(count++, at::zeros({2}), at::zeros({2}));
  });
})
// Each sample is its index and a picture of 12 KiB, as cpp_loader.py's.
PENSTOCK_DATASET(pictures, [](const penstock::Value& arguments) {
  return penstock::make_dataset(arguments["size"].integer(), [](int64_t index) {
    return std::tuple(index, at::arange(3 * 64 * 64).add(index).to(at::kByte).reshape({3, 64, 64}));
  });
})
PENSTOCK_DATASET(no_file, [](const penstock::Value&) -> std::shared_ptr<penstock::Dataset> {
  throw std::runtime_error("there is no file photographs.txt");
})
PENSTOCK_DATASET(no_dataset, [](const penstock::Value&) { return std::shared_ptr<penstock::Dataset>(); })
PENSTOCK_DATASET(bad_sample, [](const penstock::Value&) {
  return penstock::make_dataset(20, [](int64_t index) {
    if (index == 6) throw std::out_of_range("no sample here");
    return index;
  });
})
PENSTOCK_DATASET(ending_sample, [](const penstock::Value& arguments) {
  const auto code = static_cast<int>(arguments["code"].integer());
  return penstock::make_dataset(20, [code](int64_t index) {
    if (index == 6) std::_Exit(code);
    return index;
  });
})
PENSTOCK_DATASET(fatal_sample, [](const penstock::Value&) {
  return penstock::make_dataset(20, [](int64_t index) {
    if (index == 6) std::abort();
    return index;
  });
})
