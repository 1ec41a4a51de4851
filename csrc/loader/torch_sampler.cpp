// SPDX-License-Identifier: Apache-2.0
#include "loader/torch_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>

#include <algorithm>

#include "base/assert.h"

namespace penstock::loader {

namespace {

uint64_t draw_seed() {
  return static_cast<uint64_t>(at::empty({}, at::TensorOptions().dtype(at::kLong)).random_().item<int64_t>());
}

}  // namespace

TorchSampler::TorchSampler(TorchSamplerOptions options, at::Tensor buffer)
    : options_(std::move(options)), indices_(std::move(buffer)) {
  if (!indices_.defined()) indices_ = at::empty({0}, at::TensorOptions().dtype(at::kLong));
}

void TorchSampler::start() {
  has_started_ = true;
  if (!options_.shuffle) {
    at::arange_out(indices_, options_.sample_count);
    return;
  }
  if (!options_.generator) {
    options_.generator = at::detail::createCPUGenerator(options_.seed ? *options_.seed : draw_seed());
    has_own_generator_ = true;
  }
  at::randperm_out(indices_, options_.sample_count, options_.generator);
}

void TorchSampler::exhaust() {
  if (is_exhausted_) return;
  is_exhausted_ = true;
  // Torch draws a last permutation here and takes none of it: the generator moves on, which its owner can see.
  if (options_.shuffle && !has_own_generator_) {
    at::randperm(options_.sample_count, options_.generator, at::TensorOptions().dtype(at::kLong));
  }
}

std::optional<IndexSource::Indices> TorchSampler::next() {
  const auto integers = next_integers();
  if (!integers) return std::nullopt;
  return Indices{.kind = wire::IndexKind::kIntegers, .body = std::as_bytes(*integers)};
}

std::optional<std::span<const int64_t>> TorchSampler::next_integers() {
  for (; options_.skipped_batch_count > 0; --options_.skipped_batch_count) pull();
  return pull();
}

std::optional<std::span<const int64_t>> TorchSampler::pull() {
  PENSTOCK_ASSERT(options_.batch_size > 0 && options_.sample_count >= 0);
  if (!has_started_) start();
  const int64_t left = options_.sample_count - position_;
  const int64_t count = std::min(left, options_.batch_size);
  if (count < options_.batch_size) exhaust();
  if (count == 0 || (options_.drop_last && count < options_.batch_size)) return std::nullopt;
  const int64_t* first = indices_.const_data_ptr<int64_t>() + position_;
  position_ += count;
  return std::span<const int64_t>(first, static_cast<size_t>(count));
}

}  // namespace penstock::loader
