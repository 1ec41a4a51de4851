// SPDX-License-Identifier: Apache-2.0
#include "loader/index_source.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/randperm.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <limits>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "base/result.h"

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
  if (missing_count_ < options_.missing.size()) return pull_missing();
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

std::optional<std::span<const int64_t>> TorchSampler::pull_missing() {
  if (!has_started_) start();
  const Indices missing = indices_at(options_.missing[missing_count_++]);
  last_place_ = missing.first_place;
  return std::span(reinterpret_cast<const int64_t*>(missing.body.data()), missing.body.size() / sizeof(int64_t));
}

IndexSource::Indices TorchSampler::indices_at(uint64_t place) {
  const auto sample_count = static_cast<uint64_t>(options_.sample_count);
  if (options_.share) {
    const auto part = sampling::RankShare(sample_count, *options_.share).order_part(place);
    return {.kind = wire::IndexKind::kIntegers,
            .body = std::as_bytes(run(part.first, part.count)),
            .first_place = part.first};
  }
  const uint64_t first = place * static_cast<uint64_t>(options_.batch_size);
  PENSTOCK_ASSERT(has_started_ && first < sample_count, "the order has no batch ", place);
  const auto count = std::min(sample_count - first, static_cast<uint64_t>(options_.batch_size));
  return {.kind = wire::IndexKind::kIntegers, .body = std::as_bytes(run(first, count)), .first_place = first};
}

std::optional<std::span<const int64_t>> TorchSampler::pull_part() {
  const sampling::RankShare share(static_cast<uint64_t>(options_.sample_count), *options_.share);
  if (!has_started_) start();
  if (missing_count_ < options_.missing.size()) return part_of(share, options_.missing[missing_count_++]);
  if (step_ + 1 >= share.step_count()) exhaust();
  if (step_ >= share.step_count()) return std::nullopt;
  return part_of(share, step_++);
}

std::span<const int64_t> TorchSampler::part_of(const sampling::RankShare& share, uint64_t step) {
  const auto part = share.part(step);
  last_place_ = part.first;
  if (part.first + part.count <= static_cast<uint64_t>(options_.sample_count)) return run(part.first, part.count);
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

namespace {

// The draw that torch's loader and its RandomSampler make.
int64_t draw_seed(const at::Generator& generator) {
  return at::empty({}, at::TensorOptions().dtype(at::kLong)).random_(generator).item<int64_t>();
}

const at::Generator& default_generator() { return at::detail::getDefaultCPUGenerator(); }

// One copy of each generator, so that draws from the same generator are consecutive.
class GeneratorCopies {
 public:
  at::Generator& of(const std::optional<at::Generator>& generator) {
    const at::Generator& original = generator ? *generator : default_generator();
    const auto found = copies_.find(original.unsafeGetGeneratorImpl());
    if (found != copies_.end()) return found->second;
    return copies_.emplace(original.unsafeGetGeneratorImpl(), original.clone()).first->second;
  }

 private:
  std::map<const c10::GeneratorImpl*, at::Generator> copies_;
};

bool is_same(const TorchSamplerOptions& left, const TorchSamplerOptions& right) {
  return left.sample_count == right.sample_count && left.batch_size == right.batch_size &&
         left.drop_last == right.drop_last && left.shuffle == right.shuffle && left.generator == right.generator &&
         left.share == right.share;
}

}  // namespace

ExpectedEpoch::ExpectedEpoch(const NextSeeds& next, TorchSamplerOptions sampler)
    : sampler_(std::move(sampler)), seeds_(next.seeds) {
  if (sampler_.share) {
    sampler_.share->first_step = sampler_.share->first_sample = 0;
    sampler_.share->earlier.clear();
  }
  GeneratorCopies copies;
  if (next.draws_base_seed) seeds_.base_seed = draw_seed(copies.of(next.base_generator));
  if (!sampler_.shuffle) return;
  at::Generator& copy = copies.of(sampler_.generator);
  state_ = copy.get_state();
  if (sampler_.generator) {
    copy_ = copy;
  } else {
    sampler_seed_ = static_cast<uint64_t>(draw_seed(copy));
  }
}

TorchSamplerOptions ExpectedEpoch::early_sampler() const {
  TorchSamplerOptions options = sampler_;
  options.skipped_batch_count = 0;
  options.missing.clear();
  options.generator = copy_;
  options.seed = sampler_seed_;
  return options;
}

bool ExpectedEpoch::is_met(const wire::EpochSeeds& seeds, const TorchSamplerOptions& sampler) const {
  if (seeds != seeds_ || !is_same(sampler, sampler_) || sampler.skipped_batch_count > 0) return false;
  const at::Generator& generator = sampler_.generator ? *sampler_.generator : default_generator();
  return !state_.defined() || at::equal(state_, generator.get_state());
}

void ExpectedEpoch::catch_up() {
  if (copy_) {
    sampler_.generator->set_state(copy_->get_state());
  } else if (sampler_.shuffle) {
    draw_seed(default_generator());
  }
}

}  // namespace penstock::loader
