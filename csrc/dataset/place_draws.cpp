// SPDX-License-Identifier: Apache-2.0
#include "dataset/place_draws.h"

#include <ATen/CPUGeneratorImpl.h>

namespace penstock::dataset {

PlaceDraws::PlaceDraws(bool seeds_default)
    : seeds_default_(seeds_default),
      of_batch_(at::detail::createCPUGenerator()),
      of_sample_(at::detail::createCPUGenerator()) {}

void PlaceDraws::begin_map_batch(const wire::EpochSeeds& seeds, uint64_t sequence, uint64_t first_place) {
  seeds_ = seeds;
  batch_place_ = {sequence, 0};
  batch_place_size_ = 1;
  first_place_ = first_place;
  sample_place_ = 0;
  has_samples_ = true;
  is_batch_seeded_ = is_sample_seeded_ = false;
  if (is_by_sample()) return begin_collating();
  seed_default(seed_of_batch());
}

void PlaceDraws::begin_shard_batch(const wire::EpochSeeds& seeds, uint64_t shard_id, uint64_t number) {
  seeds_ = seeds;
  batch_place_ = {shard_id, number};
  batch_place_size_ = 2;
  has_samples_ = false;
  is_batch_seeded_ = is_sample_seeded_ = false;
}

void PlaceDraws::begin_sample(uint64_t place) {
  sample_place_ = place;
  is_sample_seeded_ = false;
  if (!is_by_sample()) return;  // the samples of a batch share one sequence of draws
  is_batch_seeded_ = false;
  seed_default(seed_of_sample(wire::SampleSeed::kGlobals));
}

void PlaceDraws::begin_collating() {
  if (is_by_sample()) seed_default(seeds_.seed_at(first_place_, wire::SampleSeed::kCollate));
}

void PlaceDraws::seed_default(uint64_t seed) const {
  if (!seeds_default_) return;
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(seed);
}

at::Generator& PlaceDraws::sample_generator() {
  if (!has_samples_) return batch_generator();
  if (!is_sample_seeded_) {
    of_sample_.set_current_seed(is_by_sample() ? seed_of_sample(wire::SampleSeed::kGenerator)
                                               : seeds_.seed_of_sample(batch_place_[0], sample_place_));
  }
  is_sample_seeded_ = true;
  return of_sample_;
}

at::Generator& PlaceDraws::batch_generator() {
  if (!is_batch_seeded_)
    of_batch_.set_current_seed(is_by_sample() ? seed_of_sample(wire::SampleSeed::kGlobals) : seed_of_batch());
  is_batch_seeded_ = true;
  return of_batch_;
}

}  // namespace penstock::dataset
