// SPDX-License-Identifier: Apache-2.0
#pragma once
// The random numbers of samples, by their places in the stream. A generator is seeded when it is first used: most
// datasets do not draw.

#include <ATen/core/Generator.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "penstock/dataset.h"
#include "wire/epoch_seeds.h"

namespace penstock::dataset {

// Confined to the thread that reads samples.
class PlaceDraws final : public Draws {  // NOLINT(cppcoreguidelines-virtual-class-destructor): nothing derives from it
 public:
  // `seeds_default`: also seeds torch's default generator, with the same seed as in Python's workers. Only for a
  // process that makes one batch at a time.
  explicit PlaceDraws(bool seeds_default = false);

  // Call at the start of a batch. A map-style batch has its number and the place of its first sample in the epoch's
  // order, an iterable one the shard and the batch's number in it. The samples of an iterable batch draw from the
  // batch's generator only.
  void begin_map_batch(const wire::EpochSeeds& seeds, uint64_t sequence, uint64_t first_place);
  void begin_shard_batch(const wire::EpochSeeds& seeds, uint64_t shard_id, uint64_t number);
  // Call before the sample at this place of the batch.
  void begin_sample(uint64_t place);
  // Call when the samples of the batch have been read. If each sample has separate seeds, collating uses the seeds of
  // the batch's first sample.
  void begin_collating();

  at::Generator& sample_generator() override;
  at::Generator& batch_generator() override;

 private:
  bool is_by_sample() const { return has_samples_ && seeds_.by_sample; }
  uint64_t seed_of_batch() const { return seeds_.seed_of_batch(std::span(batch_place_).first(batch_place_size_)); }
  uint64_t seed_of_sample(wire::SampleSeed which) const { return seeds_.seed_at(first_place_ + sample_place_, which); }
  void seed_default(uint64_t seed) const;

  bool seeds_default_;
  wire::EpochSeeds seeds_;
  std::array<uint64_t, 2> batch_place_{};
  size_t batch_place_size_ = 0;
  uint64_t first_place_ = 0;   // of the batch, in the order of the epoch
  uint64_t sample_place_ = 0;  // in the batch
  bool has_samples_ = false;   // whether samples have separate generators
  bool is_batch_seeded_ = false;
  bool is_sample_seeded_ = false;
  at::Generator of_batch_;
  at::Generator of_sample_;
};

}  // namespace penstock::dataset
