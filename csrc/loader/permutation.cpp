// SPDX-License-Identifier: Apache-2.0
#include "loader/permutation.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

namespace penstock::loader {
namespace {

constexpr size_t kAhead = 64;           // swaps whose places are prefetched together
constexpr int64_t kCountMin = 1 << 16;  // below this all indices fit in the caches, and torch is as fast
// From this count on, torch draws 64-bit numbers.
constexpr int64_t kCountEnd = std::numeric_limits<uint32_t>::max() / 20;

void shuffle(int64_t* result, uint32_t count, at::CPUGeneratorImpl& generator) {
  std::vector<uint32_t> indices(count);
  for (uint32_t index = 0; index < count; ++index) indices[index] = index;
  std::array<uint32_t, kAhead> places;
  for (uint32_t first = 0; first + 1 < count;) {
    const auto turn = static_cast<uint32_t>(std::min<size_t>(kAhead, count - 1 - first));
    for (uint32_t at = 0; at < turn; ++at) {
      const uint32_t index = first + at;
      places[at] = index + generator.random() % (count - index);
      __builtin_prefetch(&indices[places[at]], 1);
    }
    for (uint32_t at = 0; at < turn; ++at) std::swap(indices[first + at], indices[places[at]]);
    first += turn;
  }
  std::copy(indices.begin(), indices.end(), result);
}

at::CPUGeneratorImpl& implementation(at::Generator& generator) {
  return *at::check_generator<at::CPUGeneratorImpl>(generator);
}

void shuffle_into(at::Tensor& indices, int64_t count, at::Generator& generator) {
  indices.resize_({count});
  at::CPUGeneratorImpl& numbers = implementation(generator);
  const std::scoped_lock lock(numbers.mutex_);
  shuffle(indices.data_ptr<int64_t>(), static_cast<uint32_t>(count), numbers);
}

// Whether this torch draws the same permutation as the code here, and leaves its generator in the same state.
bool is_as_torch() {
  constexpr int64_t kTried = 1000;
  at::Generator of_torch = at::detail::createCPUGenerator(1);
  at::Generator ours = at::detail::createCPUGenerator(1);
  const auto options = at::TensorOptions().dtype(at::kLong);
  at::Tensor indices = at::empty({0}, options);
  shuffle_into(indices, kTried, ours);
  return at::randperm(kTried, of_torch, options).equal(indices) && of_torch.get_state().equal(ours.get_state());
}

bool may_draw(int64_t count) {
  if (count < kCountMin || count >= kCountEnd) return false;
  static const bool kIsAsTorch = is_as_torch();
  return kIsAsTorch;
}

}  // namespace

void draw_permutation(at::Tensor& indices, int64_t count, at::Generator& generator) {
  if (may_draw(count))
    shuffle_into(indices, count, generator);
  else
    at::randperm_out(indices, count, generator);
}

void skip_permutation(int64_t count, at::Generator& generator) {
  if (!may_draw(count)) {
    at::randperm(count, generator, at::TensorOptions().dtype(at::kLong));
    return;
  }
  at::CPUGeneratorImpl& numbers = implementation(generator);
  const std::scoped_lock lock(numbers.mutex_);
  for (int64_t drawn = 0; drawn < count - 1; ++drawn) numbers.random();
}

}  // namespace penstock::loader
