// SPDX-License-Identifier: Apache-2.0
#pragma once
// The order of a dataset's samples. Without a sampler the loader uses torch's order, with exactly the permutations of
// Python's RandomSampler: the same seed gives a C++ loop and a Python loop the same order.

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/export.h"

namespace penstock {

// A user-defined order. Confined to the trainer's thread; a sampler serves one loader at a time.
class PENSTOCK_API Sampler {
 public:
  Sampler() = default;
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;
  virtual ~Sampler();

  // Starts epoch number `epoch` of its loader, from 0. A loader that resumes an epoch, or calls reshard() in one, calls
  // this again, then draws the batches that were already delivered from next() and discards them: the same number must
  // start the same order.
  virtual void begin_epoch(int64_t epoch) = 0;

  // The indices of the next batch: `batch_size` of them, or fewer at the end. No value when the epoch is over. A
  // sampler that chooses its own batch sizes ignores `batch_size`, which is 1 for a loader without a batch size.
  virtual std::optional<std::vector<int64_t>> next(int64_t batch_size) = 0;

  // The number of samples in an epoch, if it is known.
  virtual std::optional<int64_t> size() const;
};

// The share of one rank, like torch.utils.data.DistributedSampler: the same indices if set_epoch() is called with the
// same numbers. The permutation depends only on `seed` and the epoch.
class PENSTOCK_API DistributedSampler : public Sampler {
 public:
  struct Options {
    int64_t num_replicas = 1;  // number of ranks
    int64_t rank = 0;          // this rank, from 0
    bool shuffle = true;
    uint64_t seed = 0;       // the same on all ranks
    bool drop_last = false;  // if ranks do not divide the samples: drop samples instead of repeating some
  };

  // Shares out `dataset_size` samples. Throws kValue for a rank that is not below num_replicas.
  DistributedSampler(int64_t dataset_size, const Options& options);

  // Sets the number that determines the permutation of later epochs, as in Python. The loader does not call this at the
  // start of an epoch.
  void set_epoch(int64_t epoch) { epoch_ = epoch; }

  void begin_epoch(int64_t epoch) override;
  std::optional<std::vector<int64_t>> next(int64_t batch_size) override;
  std::optional<int64_t> size() const override { return sample_count_; }

 private:
  // The position of this rank's sample `number` in the order of all ranks.
  int64_t place_of(int64_t number) const;

  int64_t dataset_size_;
  Options options_;
  int64_t sample_count_;  // of this rank
  int64_t epoch_ = 0;
  std::vector<int64_t> indices_;  // of this rank, if shuffled
  int64_t position_ = 0;          // of the next sample; sample_count_ when no epoch is in progress
};

}  // namespace penstock
