// SPDX-License-Identifier: Apache-2.0
#include "loader/torch_sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/assert.h"
#include "loader/permutation.h"

namespace penstock::loader {

namespace {

uint64_t draw_seed() {
  return static_cast<uint64_t>(at::empty({}, at::TensorOptions().dtype(at::kLong)).random_().item<int64_t>());
}

}  // namespace

TorchSampler::TorchSampler(TorchSamplerOptions options, at::Tensor buffer)
    : options_(std::move(options)), indices_(std::move(buffer)) {
  if (options_.share) step_ = options_.share->first_step;
  if (!indices_.defined()) indices_ = at::empty({0}, at::TensorOptions().dtype(at::kLong));
}

void TorchSampler::start() {
  has_started_ = true;
  if (!options_.shuffle) return;
  if (!options_.generator) {
    options_.generator = at::detail::createCPUGenerator(options_.seed ? *options_.seed : draw_seed());
    has_own_generator_ = true;
  }
  draw_permutation(indices_, options_.sample_count, *options_.generator);
}

void TorchSampler::exhaust() {
  if (is_exhausted_) return;
  is_exhausted_ = true;
  // Torch draws a last permutation here and discards it: the generator advances, which is visible to its owner.
  if (options_.shuffle && !has_own_generator_) {
    skip_permutation(options_.sample_count, *options_.generator);
  }
}

std::optional<IndexSource::Indices> TorchSampler::next() {
  const auto integers = next_integers();
  if (!integers) return std::nullopt;
  return Indices{.kind = wire::IndexKind::kIntegers, .body = std::as_bytes(*integers), .first_place = last_place_};
}

std::optional<std::span<const int64_t>> TorchSampler::next_integers() {
  if (options_.share) {
    step_ = std::max(step_, static_cast<uint64_t>(std::exchange(options_.skipped_batch_count, 0)));
    return pull_part();
  }
  if (options_.skipped_batch_count > 0) skip(std::exchange(options_.skipped_batch_count, 0));
  return pull();
}

void TorchSampler::skip(int64_t batch_count) {
  if (!options_.shuffle) {
    const int64_t whole_count = options_.sample_count / options_.batch_size;
    position_ = batch_count <= whole_count ? batch_count * options_.batch_size : options_.sample_count;
    return;
  }
  for (; batch_count > 0; --batch_count) pull();
}

std::optional<std::span<const int64_t>> TorchSampler::pull_part() {
  const auto sample_count = static_cast<uint64_t>(options_.sample_count);
  const sampling::RankShare share(sample_count, *options_.share);
  if (!has_started_) start();
  if (step_ + 1 >= share.step_count()) exhaust();
  if (step_ >= share.step_count()) return std::nullopt;
  const uint64_t step = step_++;
  const auto part = share.part(step);
  last_place_ = part.first;
  if (part.first + part.count <= sample_count) return run(part.first, part.count);
  batch_.clear();
  for (const uint64_t place : share.samples(step)) batch_.push_back(index_at(place));
  return batch_;
}

std::optional<std::span<const int64_t>> TorchSampler::pull() {
  PENSTOCK_ASSERT(options_.batch_size > 0 && options_.sample_count >= 0);
  if (!has_started_) start();
  const int64_t left = options_.sample_count - position_;
  const int64_t count = std::min(left, options_.batch_size);
  if (count < options_.batch_size) exhaust();
  if (count == 0 || (options_.drop_last && count < options_.batch_size)) return std::nullopt;
  last_place_ = static_cast<uint64_t>(position_);
  position_ += count;
  return run(last_place_, static_cast<uint64_t>(count));
}

std::span<const int64_t> TorchSampler::run(uint64_t first_place, uint64_t count) {
  if (options_.shuffle) return {indices_.const_data_ptr<int64_t>() + first_place, count};
  batch_.resize(count);
  std::iota(batch_.begin(), batch_.end(), static_cast<int64_t>(first_place));
  return batch_;
}

int64_t TorchSampler::index_at(uint64_t place) const {
  return options_.shuffle ? indices_.const_data_ptr<int64_t>()[place] : static_cast<int64_t>(place);
}

}  // namespace penstock::loader
