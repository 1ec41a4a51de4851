// SPDX-License-Identifier: Apache-2.0
#pragma once
// The indices of torch's BatchSampler over RandomSampler or SequentialSampler, without a Python integer per sample.
// Draws the same numbers from the same generators at the same moments as torch's Python code: a seed (only if no
// generator was given) and one permutation at the first pull, and one more permutation at the pull that finds the
// sampler exhausted, which torch makes and discards. Only a permutation needs memory: sequential indices are computed.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "loader/index_source.h"
#include "sampling/rank_share.h"

namespace penstock::loader {

struct TorchSamplerOptions {
  int64_t sample_count = 0;
  int64_t batch_size = 1;
  bool drop_last = false;
  bool shuffle = false;
  std::optional<at::Generator> generator;  // of the sampler; nullopt: seeded from torch's default generator
  std::optional<uint64_t> seed = {};       // the seed to use then, if it is known already
  int64_t skipped_batch_count = 0;         // of a resumed epoch: drawn again at the first pull, and skipped
  // The share of one rank, in place of batch_size and drop_last: all ranks have one common order.
  std::optional<sampling::RankShareOptions> share = {};
};

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

  // Whether it has made its last draw.
  bool is_exhausted() const { return is_exhausted_; }

  at::Tensor take_buffer() { return std::move(indices_); }

 private:
  std::optional<std::span<const int64_t>> pull();
  std::optional<std::span<const int64_t>> pull_part();
  void skip(int64_t batch_count);
  void start();
  void exhaust();
  // The indices at `count` places of the order, valid until the next call.
  std::span<const int64_t> run(uint64_t first_place, uint64_t count);
  int64_t index_at(uint64_t place) const;

  TorchSamplerOptions options_;
  at::Tensor indices_;          // the permutation; empty without one
  int64_t position_ = 0;        // of the next batch in the order
  uint64_t step_ = 0;           // the next step of a rank's share
  uint64_t last_place_ = 0;     // of the first sample of the last batch
  std::vector<int64_t> batch_;  // the last batch, if it is not a part of the permutation
  bool has_started_ = false;
  bool is_exhausted_ = false;
  bool has_own_generator_ = false;
};

}  // namespace penstock::loader
