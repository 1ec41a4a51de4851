// SPDX-License-Identifier: Apache-2.0
#pragma once
// The draws of a stream's next epoch if nothing happens until it begins, found out on copies of the generators,
// which stay as they are. With persistent workers batches of that epoch can be asked for while the one before it ends.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "loader/torch_sampler.h"
#include "wire/epoch_seeds.h"

namespace penstock::loader {

// How the epoch after one comes to its seeds.
struct NextSeeds {
  wire::EpochSeeds seeds;                         // where its base seed is known
  bool draws_base_seed = false;                   // it is drawn when the epoch begins
  std::optional<at::Generator> base_generator{};  // from this one; torch's default generator without one
};

// Confined to the trainer's thread.
class ExpectedEpoch {
 public:
  // Expects an epoch that takes its indices from `sampler` and begins after the draws that are expected until then.
  ExpectedEpoch(const NextSeeds& next, TorchSamplerOptions sampler);

  const wire::EpochSeeds& seeds() const { return seeds_; }
  // The sampler to ask for its batches with, which draws from a copy of the user's generator.
  TorchSamplerOptions early_sampler() const;

  // Whether an epoch of these seeds and indices that begins now is the expected one.
  bool is_met(const wire::EpochSeeds& seeds, const TorchSamplerOptions& sampler) const;

  // The epoch was begun early and has now begun: moves the generators on by the draws that were made for it meanwhile.
  void catch_up();

 private:
  TorchSamplerOptions sampler_;
  wire::EpochSeeds seeds_;
  at::Tensor state_;                      // of the generator that the sampler draws from, before that
  std::optional<at::Generator> copy_;     // of the user's
  std::optional<uint64_t> sampler_seed_;  // where the user gave the sampler no generator
};

}  // namespace penstock::loader
