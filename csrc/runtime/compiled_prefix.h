// SPDX-License-Identifier: Apache-2.0
#pragma once
// A CompiledPrefix is a prefix compiled by AOTInductor. CompiledTrial decides whether it replaces the executor, by
// comparing results bit for bit with is_same_bits().

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace penstock::runtime {

// A tensor of the batch as the library expects it.
struct LeafLayout {
  uint32_t leaf_index = 0;
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
};

// A shared library with the compiled prefix, for batches of one size. The library is in memory private to this process,
// so no part of it is on disk. Thread-compatible. Must not be used across a fork.
class CompiledPrefix {
 public:
  // `leaves` are the library's inputs in order. Returns kUnsupported if the library cannot be loaded.
  static Result<CompiledPrefix> load(std::string_view library, std::vector<LeafLayout> leaves);
  CompiledPrefix(CompiledPrefix&&) noexcept;
  CompiledPrefix& operator=(CompiledPrefix&&) noexcept;
  ~CompiledPrefix();

  // Whether the library was compiled for batches with these leaves.
  bool accepts(std::span<const at::Tensor> leaves) const;

  // Returns the prefix's outputs in order, for leaves that it accepts. Returns kUnsupported if the library fails.
  Result<std::vector<at::Tensor>> run(std::span<const at::Tensor> leaves) const;

 private:
  struct Library;
  CompiledPrefix(std::unique_ptr<Library> library, std::vector<LeafLayout> leaves);

  std::unique_ptr<Library> library_;
  std::vector<LeafLayout> leaves_;
};

// Decides whether compiled code replaces the executor: only if it gives the same bits on every batch that is compared,
// and takes less time. Both run for the first batches, and then for one batch in kCompareEvery; a difference is final.
// Pure. Confined to one thread.
class CompiledTrial {
 public:
  static constexpr size_t kWarmups = 2;  // compared, not timed
  static constexpr size_t kTimed = 9;    // compared and timed
  static constexpr double kGain = 0.95;  // maximal time, as a fraction of the executor's
  static constexpr uint64_t kCompareEvery = 64;

  enum class Choice : uint8_t { kBoth, kCompiled, kExecutor };

  // Returns the code to run for the next batch.
  Choice next() {
    if (state_ == State::kRefused) return Choice::kExecutor;
    if (state_ == State::kTrying) return Choice::kBoth;
    return ++used_count_ % kCompareEvery == 0 ? Choice::kBoth : Choice::kCompiled;
  }

  // Call after running both.
  void note(bool is_same, double executor_s, double compiled_s) {
    if (!is_same) return refuse();
    if (state_ != State::kTrying || compared_count_++ < kWarmups) return;
    const size_t index = compared_count_ - kWarmups - 1;
    executor_s_[index] = executor_s;
    compiled_s_[index] = compiled_s;
    if (index + 1 < kTimed) return;
    state_ = median(compiled_s_) < kGain * median(executor_s_) ? State::kUsed : State::kRefused;
  }

  // Call if the compiled code is wrong or has failed.
  void refuse() { state_ = State::kRefused; }

  bool is_used() const { return state_ == State::kUsed; }
  bool is_refused() const { return state_ == State::kRefused; }

 private:
  enum class State : uint8_t { kTrying, kUsed, kRefused };
  using Seconds = std::array<double, kTimed>;

  static double median(Seconds seconds) {
    std::nth_element(seconds.begin(), seconds.begin() + kTimed / 2, seconds.end());
    return seconds[kTimed / 2];
  }

  State state_ = State::kTrying;
  size_t compared_count_ = 0;
  uint64_t used_count_ = 0;
  Seconds executor_s_{};
  Seconds compiled_s_{};
};

// Whether two tensors are on the same device and have the same dtype, sizes, strides, pending conjugations and
// negations, and the same bytes in each element. Comparing values is not enough: NaN differs from itself, -0.0 equals
// 0.0, and kernels traverse memory with another layout differently. Bytes between the elements do not count. Waits for
// a device.
bool is_same_bits(const at::Tensor& a, const at::Tensor& b);

// Whether both have the same number of tensors, and each pair has the same bits.
bool is_same_bits(std::span<const at::Tensor> a, std::span<const at::Tensor> b);

}  // namespace penstock::runtime
