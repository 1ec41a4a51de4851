// SPDX-License-Identifier: Apache-2.0
#include "loader/expected_epoch.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>

#include <map>
#include <utility>

namespace penstock::loader {

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
  if (sampler_.share) sampler_.share->first_step = sampler_.share->first_sample = 0;
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
