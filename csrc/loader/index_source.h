// SPDX-License-Identifier: Apache-2.0
#pragma once
// The indices of an epoch's batches. An IndexSource supplies them: a user-defined sampler, or TorchSampler, which makes
// the draws of torch's samplers. ExpectedEpoch predicts the draws of the next epoch.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sampling/rank_share.h"
#include "wire/epoch_seeds.h"
#include "wire/message.h"

namespace penstock::loader {

// Confined to the trainer's thread.
class IndexSource {
 public:
  IndexSource() = default;
  IndexSource(const IndexSource&) = delete;
  IndexSource& operator=(const IndexSource&) = delete;
  virtual ~IndexSource() = default;

  struct Indices {
    wire::IndexKind kind = wire::IndexKind::kNone;
    std::span<const std::byte> body{};  // valid until the next call
    uint64_t first_place = 0;           // of the first sample in the epoch's order, from 0
  };
  // Returns the indices of the next batch, or nullopt at the end. A user-defined sampler may throw: the exception
  // propagates from the stream's call that pulled.
  virtual std::optional<Indices> next() = 0;
};

// Writes the permutation of 0 to `count` - 1 that torch.randperm would draw from the CPU generator to `indices`, an
// int64 tensor that is resized. This takes half of torch's time for millions of indices.
//
// Torch shuffles in place (R. A. Fisher and F. Yates; R. Durstenfeld, "Algorithm 235: Random permutation",
// Communications of the ACM 7 (1964), page 420): index i is swapped with a randomly drawn index at or after i. Nearly
// all the time is spent on cache misses, one after another. Here the random numbers of the next swaps are drawn first,
// and their places are prefetched; and the indices are 32-bit while they are shuffled. The permutation is bit-for-bit
// identical to torch's, and the generator ends in the same state. If this process's torch does not shuffle in this way,
// torch draws the permutation.
void draw_permutation(at::Tensor& indices, int64_t count, at::Generator& generator);

// Leaves the generator in the state in which draw_permutation() would leave it.
void skip_permutation(int64_t count, at::Generator& generator);

struct TorchSamplerOptions {
  int64_t sample_count = 0;
  int64_t batch_size = 1;
  bool drop_last = false;
  bool shuffle = false;
  std::optional<at::Generator> generator;  // of the sampler; nullopt: seeded from torch's default generator
  std::optional<uint64_t> seed = {};       // the seed to use then, if it is known already
  int64_t skipped_batch_count = 0;         // of a resumed epoch: drawn again at the first pull, and skipped
  std::vector<uint64_t> missing = {};      // except these places, ascending, which are given first
  // The share of one rank, in place of batch_size and drop_last: all ranks have one common order.
  std::optional<sampling::RankShareOptions> share = {};
};

// The indices of torch's BatchSampler over RandomSampler or SequentialSampler, without a Python integer per sample.
// Draws the same numbers from the same generators at the same moments as torch's Python code: a seed (only if no
// generator was given) and one permutation at the first pull, and one more permutation at the pull that finds the
// sampler exhausted, which torch makes and discards. Only a permutation needs memory: sequential indices are computed.
//
// Confined to the trainer's thread.
class TorchSampler : public IndexSource {
 public:
  // `buffer` is the result of take_buffer() of an earlier stream, or undefined. A permutation of a large dataset takes
  // megabytes, whose pages should be faulted in only once and not in every epoch.
  explicit TorchSampler(TorchSamplerOptions options, at::Tensor buffer = {});

  const TorchSamplerOptions& options() const { return options_; }

  std::optional<Indices> next() override;
  // Returns the indices of the next batch as integers.
  std::optional<std::span<const int64_t>> next_integers();

  // Draws from another generator from now on: the user's, once its state matches its copy's. Has no effect on a sampler
  // that made its generator from a seed.
  void rebind(const at::Generator& generator) {
    if (!has_own_generator_) options_.generator = generator;
  }

  // The indices of the batch at a place of the order, which were pulled; valid until the next call. With `share`, of
  // the step at that place, of all ranks.
  Indices indices_at(uint64_t place);

  // Whether it has made its last draw.
  bool is_exhausted() const { return is_exhausted_; }

  at::Tensor take_buffer() { return std::move(indices_); }

 private:
  std::optional<std::span<const int64_t>> pull();
  std::optional<std::span<const int64_t>> pull_missing();
  std::optional<std::span<const int64_t>> pull_part();
  std::span<const int64_t> part_of(const sampling::RankShare& share, uint64_t step);
  void skip(int64_t batch_count);
  void start();
  void exhaust();
  // The indices at `count` places of the order, valid until the next call.
  std::span<const int64_t> run(uint64_t first_place, uint64_t count);
  int64_t index_at(uint64_t place) const;

  TorchSamplerOptions options_;
  at::Tensor indices_;          // the permutation; empty without one
  int64_t position_ = 0;        // of the next batch in the order
  size_t missing_count_ = 0;    // of the missing places, given so far
  uint64_t step_ = 0;           // the next step of a rank's share
  uint64_t last_place_ = 0;     // of the first sample of the last batch
  std::vector<int64_t> batch_;  // the last batch, if it is not a part of the permutation
  bool has_started_ = false;
  bool is_exhausted_ = false;
  bool has_own_generator_ = false;
};

// How the next epoch gets its seeds.
struct NextSeeds {
  wire::EpochSeeds seeds;                         // if its base seed is known
  bool draws_base_seed = false;                   // it is drawn when the epoch starts
  std::optional<at::Generator> base_generator{};  // the generator to draw it from; nullopt: torch's default generator
};

// Predicts the draws of a stream's next epoch, assuming that no other draws happen before it starts. The draws are made
// from copies of the generators, which stay unchanged. With persistent workers, batches of that epoch can be requested
// while the previous one ends.
//
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
