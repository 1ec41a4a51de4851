// SPDX-License-Identifier: Apache-2.0
// usage: gpu_widen cuda|cpu ROUNDS BYTES
// Widens tensors of BYTES that came with fewer of them, and copies as many bytes on the same device. Prints one JSON
// line for each encoding: bytes read and written by both, and the seconds of each round. With `cpu`, the CPU does. Ends
// with 3 where there are no kernels for the device. bench/gpu.py runs it.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "wire/narrow.h"

#ifdef PENSTOCK_WITH_KERNELS
#include <cuda_runtime_api.h>

#include "device/widen_kernels.h"
#endif

namespace penstock {
namespace {

using wire::DTypeCode;
using wire::Encoding;
using wire::TensorEntry;

constexpr int kWarmUpCount = 3;
constexpr DTypeCode kInt64 = 4, kFloat32 = 6, kBool = 11;
constexpr int64_t kRowItems = 1024;

struct Case {
  std::string name;
  TensorEntry entry;  // of the narrow bytes
  std::vector<std::byte> narrow;
  uint64_t wide_bytes = 0;
};

// A tensor of as many rows of kRowItems as fit into `bytes`, or without rows, in the form that a worker takes for it.
template <typename T>
Case make_case(const std::string& name, DTypeCode dtype, bool has_rows, uint64_t bytes,
               const std::function<T(int64_t row, int64_t item)>& value) {
  const auto row_count = static_cast<int64_t>(bytes / sizeof(T)) / kRowItems;
  std::vector<T> values(static_cast<size_t>(row_count * kRowItems));
  for (int64_t row = 0; row < row_count; ++row)
    for (int64_t item = 0; item < kRowItems; ++item)
      values[static_cast<size_t>(row * kRowItems + item)] = value(row, item);
  Case made{.name = name, .entry = {}, .narrow = {}, .wide_bytes = values.size() * sizeof(T)};
  made.entry.dtype = dtype;
  made.entry.shape = {row_count * kRowItems};
  made.entry.strides = {1};
  if (has_rows) made.entry.shape = {row_count, kRowItems}, made.entry.strides = {kRowItems, 1};
  made.entry.bytes = made.wide_bytes;
  const auto plain = std::as_bytes(std::span(values));
  const auto form = wire::narrowest_form(made.entry, plain);
  PENSTOCK_ASSERT(form, name, " is not compressed");
  made.narrow.resize(form->bytes);
  wire::write_narrow(*form, made.entry, plain, made.narrow);
  made.entry.encoding = form->encoding;
  made.entry.bytes = form->bytes;
  return made;
}

std::vector<Case> make_cases(uint64_t bytes) {
  std::mt19937_64 random(1);
  const auto below = [&](uint64_t range) {
    return [&random, range](int64_t, int64_t) { return static_cast<int64_t>(random() % range); };
  };
  // Each stands in eight rows: tensors that would be more than kWidenFactorMax times as large are not sent as rows.
  const size_t user_count = std::max<uint64_t>(1, bytes / (sizeof(float) * kRowItems) / 8);
  std::vector<float> users(kRowItems * user_count);
  for (float& one : users) one = static_cast<float>(random());
  std::vector<Case> cases;
  cases.push_back(make_case<int64_t>("offset8", kInt64, false, bytes, below(200)));
  cases.push_back(make_case<int64_t>("offset16", kInt64, false, bytes, below(60'000)));
  cases.push_back(make_case<int64_t>("offset32", kInt64, false, bytes, below(4'000'000'000)));
  cases.push_back(make_case<uint8_t>("bits", kBool, false, bytes,
                                     [&](int64_t, int64_t) { return static_cast<uint8_t>(random() % 2); }));
  cases.push_back(make_case<float>("rows", kFloat32, true, bytes, [&](int64_t row, int64_t item) {
    return users[static_cast<size_t>(row) * 7 % user_count * kRowItems + static_cast<size_t>(item)];
  }));
  cases.push_back(make_case<int64_t>("padded", kInt64, true, bytes, [&](int64_t row, int64_t item) {
    return item < row * 97 % (kRowItems - 1) ? static_cast<int64_t>(random() | 1) : 0;
  }));
  return cases;
}

struct Seconds {
  std::vector<double> widen;
  std::vector<double> copy;
};

Seconds measure_cpu(const Case& one, int round_count) {
  std::vector<std::byte> wide(one.wide_bytes), copied(one.wide_bytes);
  const auto time = [](const auto& work) {
    const auto begun = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  };
  Seconds seconds;
  for (int round = -kWarmUpCount; round < round_count; ++round) {
    const double widen = time([&] { PENSTOCK_ASSERT(wire::widen(one.entry, one.narrow, wide)); });
    const double copy = time([&] { std::memcpy(copied.data(), wide.data(), wide.size()); });
    if (round >= 0) seconds.widen.push_back(widen), seconds.copy.push_back(copy);
  }
  return seconds;
}

#ifdef PENSTOCK_WITH_KERNELS

void expect(int status) {
  PENSTOCK_ASSERT(status == cudaSuccess, cudaGetErrorString(static_cast<cudaError_t>(status)));
}

std::byte* allocate(uint64_t bytes) {
  void* memory = nullptr;
  expect(cudaMalloc(&memory, bytes + 1));
  return static_cast<std::byte*>(memory);
}

Seconds measure_cuda(const Case& one, int round_count) {
  const wire::Widening widening = wire::check_narrow(one.entry, one.narrow).value();
  uint64_t scratch_bytes = 0;
  expect(device::widen_scratch_bytes(widening, scratch_bytes));
  std::byte* const narrow = allocate(one.narrow.size());
  std::byte* const scratch = allocate(scratch_bytes);
  std::byte* const target = allocate(one.wide_bytes);
  std::byte* const copied = allocate(one.wide_bytes);
  expect(cudaMemcpy(narrow, one.narrow.data(), one.narrow.size(), cudaMemcpyHostToDevice));
  cudaStream_t stream = nullptr;
  expect(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  cudaEvent_t begin = nullptr, end = nullptr;
  expect(cudaEventCreate(&begin));
  expect(cudaEventCreate(&end));
  const auto time = [&](const auto& work) {
    expect(cudaEventRecord(begin, stream));
    work();
    expect(cudaEventRecord(end, stream));
    expect(cudaEventSynchronize(end));
    float milliseconds = 0;
    expect(cudaEventElapsedTime(&milliseconds, begin, end));
    return milliseconds / 1e3;
  };
  Seconds seconds;
  for (int round = -kWarmUpCount; round < round_count; ++round) {
    const double widen = time([&] {
      expect(device::start_widening(
          widening, {.narrow = narrow, .scratch = scratch, .scratch_bytes = scratch_bytes, .target = target}, stream));
    });
    const double copy =
        time([&] { expect(cudaMemcpyAsync(copied, target, one.wide_bytes, cudaMemcpyDeviceToDevice, stream)); });
    if (round >= 0) seconds.widen.push_back(widen), seconds.copy.push_back(copy);
  }
  std::vector<std::byte> found(one.wide_bytes), wide(one.wide_bytes);
  expect(cudaMemcpy(found.data(), target, found.size(), cudaMemcpyDeviceToHost));
  PENSTOCK_ASSERT(wire::widen(one.entry, one.narrow, wide));
  PENSTOCK_ASSERT(found == wide, one.name, " was decompressed incorrectly");
  for (std::byte* memory : {narrow, scratch, target, copied}) expect(cudaFree(memory));
  expect(cudaEventDestroy(begin));
  expect(cudaEventDestroy(end));
  expect(cudaStreamDestroy(stream));
  return seconds;
}

std::string missing_kernels() {
  const auto status = static_cast<cudaError_t>(device::try_widen_kernels());
  return status == cudaSuccess ? "" : std::string("the kernels cannot run here: ") + cudaGetErrorString(status);
}

#else

Seconds measure_cuda(const Case&, int) { return {}; }
std::string missing_kernels() { return "this build of penstock contains no kernels"; }

#endif

void print(std::string_view name, const std::vector<double>& values) {
  std::cout << ", \"" << name << "\": [";
  for (size_t index = 0; index < values.size(); ++index) std::cout << (index > 0 ? ", " : "") << values[index];
  std::cout << "]";
}

int run(bool on_cuda, int round_count, uint64_t bytes) {
  if (const auto missing = on_cuda ? missing_kernels() : ""; !missing.empty()) {
    std::cerr << missing << "\n";
    return 3;
  }
  for (const Case& one : make_cases(bytes)) {
    const Seconds seconds = on_cuda ? measure_cuda(one, round_count) : measure_cpu(one, round_count);
    std::cout << "{\"encoding\": \"" << one.name << "\", \"widen_bytes\": " << one.narrow.size() + one.wide_bytes
              << ", \"copy_bytes\": " << 2 * one.wide_bytes;
    print("widen_s", seconds.widen);
    print("copy_s", seconds.copy);
    std::cout << "}\n";
  }
  return 0;
}

}  // namespace
}  // namespace penstock

int main(int argc, char** argv) {
  const std::string_view device = argc == 4 ? argv[1] : "";
  const int round_count = argc == 4 ? std::atoi(argv[2]) : 0;
  const uint64_t bytes = argc == 4 ? std::strtoull(argv[3], nullptr, 10) : 0;
  if ((device != "cuda" && device != "cpu") || round_count < 1 || bytes < (1 << 20)) {
    std::cerr << "usage: gpu_widen cuda|cpu ROUNDS BYTES   (BYTES must be at least 1 MiB)\n";
    return 2;
  }
  return penstock::run(device == "cuda", round_count, bytes);
}
