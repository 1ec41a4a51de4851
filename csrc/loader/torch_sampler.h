// SPDX-License-Identifier: Apache-2.0
#pragma once
// The indices of torch's own BatchSampler over RandomSampler or SequentialSampler, without a Python integer per sample.
// Draws from the same generators, the same numbers, at the same moments as torch's Python code: a seed (only when no
// generator was given) and one permutation at the first pull, and one more permutation at the pull that finds the
// sampler exhausted, which torch makes and throws away. Only a permutation takes memory: samples in order are counted.

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
  std::optional<at::Generator> generator;  // of the sampler; torch's default generator gives the seed without one
  std::optional<uint64_t> seed = {};       // and this is the seed where it is known already
  int64_t skipped_batch_count = 0;         // of a resumed epoch: drawn at the first pull, as they were, and not given
  // The part of one rank, in the place of batch_size and drop_last: the order is one for all ranks.
  std::optional<sampling::RankShareOptions> share = {};
};

// Confined to the trainer's thread.
class TorchSampler : public IndexSource {
 public:
  // `buffer` is the result of take_buffer() of an earlier stream, or undefined. A permutation of a large dataset takes
  // megabytes, whose pages are better faulted in once than at every epoch.
  explicit TorchSampler(TorchSamplerOptions options, at::Tensor buffer = {});

  const TorchSamplerOptions& options() const { return options_; }

  std::optional<Indices> next() override;
  // The indices of the next batch as integers.
  std::optional<std::span<const int64_t>> next_integers();

  // Draws from another generator from now on: the user's own, which has come to where a copy of it is. Without effect
  // on a stream that made its generator from a seed.
  void rebind(const at::Generator& generator) {
    if (!has_own_generator_) options_.generator = generator;
  }

  // Whether it has drawn all that it will draw.
  bool is_exhausted() const { return is_exhausted_; }

  at::Tensor take_buffer() { return std::move(indices_); }

 private:
  std::optional<std::span<const int64_t>> pull();
  std::optional<std::span<const int64_t>> pull_part();
  void skip(int64_t batch_count);
  void start();
  void exhaust();
  // The indices at `count` places of the order, until the next call.
  std::span<const int64_t> run(uint64_t first_place, uint64_t count);
  int64_t index_at(uint64_t place) const;

  TorchSamplerOptions options_;
  at::Tensor indices_;          // the permutation; empty without one
  int64_t position_ = 0;        // of the next batch in the order
  uint64_t step_ = 0;           // the next, of a rank's share
  uint64_t last_place_ = 0;     // of the first sample that was given last
  std::vector<int64_t> batch_;  // given last, where it is no part of the permutation
  bool has_started_ = false;
  bool is_exhausted_ = false;
  bool has_own_generator_ = false;
};

}  // namespace penstock::loader
