// SPDX-License-Identifier: Apache-2.0
#pragma once
// Predicts the draws of a stream's next epoch, assuming that no other draws happen before it starts. The draws are made
// from copies of the generators, which stay unchanged. With persistent workers, batches of that epoch can be requested
// while the previous one ends.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "loader/torch_sampler.h"
#include "wire/epoch_seeds.h"

namespace penstock::loader {

// How the next epoch gets its seeds.
struct NextSeeds {
  wire::EpochSeeds seeds;                         // if its base seed is known
  bool draws_base_seed = false;                   // it is drawn when the epoch starts
  std::optional<at::Generator> base_generator{};  // the generator to draw it from; nullopt: torch's default generator
};

// Confined to the trainer's thread.
class ExpectedEpoch {
 public:
  // Predicts an epoch that takes its indices from `sampler` and starts after the draws that are expected before it.
  ExpectedEpoch(const NextSeeds& next, TorchSamplerOptions sampler);

  const wire::EpochSeeds& seeds() const { return seeds_; }
  // The sampler for requesting its batches, which draws from a copy of the user's generator.
  TorchSamplerOptions early_sampler() const;

  // Whether an epoch that starts now with these seeds and indices is the predicted one.
  bool is_met(const wire::EpochSeeds& seeds, const TorchSamplerOptions& sampler) const;

  // The epoch was requested early and has now started: advances the generators by the draws that were made for it.
  void catch_up();

 private:
  TorchSamplerOptions sampler_;
  wire::EpochSeeds seeds_;
  at::Tensor state_;                      // of the sampler's generator, before the sampler draws
  std::optional<at::Generator> copy_;     // of the user's generator
  std::optional<uint64_t> sampler_seed_;  // if the user gave the sampler no generator
};

}  // namespace penstock::loader
