// SPDX-License-Identifier: Apache-2.0
#pragma once
// The order of a dataset's samples. Without a sampler the loader has torch's own order, with the permutations of
// Python's RandomSampler to the bit: the same seed gives a C++ loop and a Python loop one order.

#include <cstdint>
#include <optional>
#include <vector>

#include "penstock/export.h"

namespace penstock {

// An order that the program chooses. Confined to the trainer's thread; a sampler is of one loader at a time.
class PENSTOCK_API Sampler {
 public:
  Sampler() = default;
  Sampler(const Sampler&) = delete;
  Sampler& operator=(const Sampler&) = delete;
  virtual ~Sampler();

  // An epoch begins: the `epoch`-th of its loader, from 0. A loader that resumes an epoch begins it, and takes the
  // batches from next() that were given before without reading them.
  virtual void begin_epoch(int64_t epoch) = 0;

  // The indices of the next batch, `batch_size` of them or fewer at the end. Nothing when the epoch is over. A sampler
  // that makes batches of its own sizes ignores `batch_size`, which is 1 for a loader without one.
  virtual std::optional<std::vector<int64_t>> next(int64_t batch_size) = 0;

  // The number of samples in an epoch, if it is known.
  virtual std::optional<int64_t> size() const;
};

// The share of one rank, as torch.utils.data.DistributedSampler: the same indices to the bit, where set_epoch() is
// called alike. The permutation follows from `seed` and the epoch alone.
class PENSTOCK_API DistributedSampler : public Sampler {
 public:
  struct Options {
    int64_t num_replicas = 1;  // ranks
    int64_t rank = 0;          // this one, from 0
    bool shuffle = true;
    uint64_t seed = 0;       // the same on all ranks
    bool drop_last = false;  // leave samples out, in the place of giving some twice, where ranks do not divide them
  };

  // `dataset_size` samples are shared out. Throws kValue for a rank that is not below num_replicas.
  DistributedSampler(int64_t dataset_size, const Options& options);

  // The permutation of later epochs follows from this number, as in Python. A loader that begins an epoch does not call
  // it.
  void set_epoch(int64_t epoch) { epoch_ = epoch; }

  void begin_epoch(int64_t epoch) override;
  std::optional<std::vector<int64_t>> next(int64_t batch_size) override;
  std::optional<int64_t> size() const override { return sample_count_; }

 private:
  // The place in the order of all ranks of this rank's sample of that number.
  int64_t place_of(int64_t number) const;

  int64_t dataset_size_;
  Options options_;
  int64_t sample_count_;  // of this rank
  int64_t epoch_ = 0;
  std::vector<int64_t> indices_;  // of this rank, where they are shuffled
  int64_t position_ = 0;          // of the next sample; sample_count_ where no epoch is under way
};

}  // namespace penstock
