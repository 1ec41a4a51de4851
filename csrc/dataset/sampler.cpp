// SPDX-License-Identifier: Apache-2.0
#include "penstock/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>

#include <algorithm>
#include <numeric>
#include <string>

#include "penstock/error.h"

namespace penstock {

Sampler::~Sampler() = default;
std::optional<int64_t> Sampler::size() const { return std::nullopt; }

DistributedSampler::DistributedSampler(int64_t dataset_size, const Options& options)
    : dataset_size_(dataset_size), options_(options) {
  if (options.num_replicas < 1 || options.rank < 0 || options.rank >= options.num_replicas) {
    throw Error(ErrorKind::kValue, "Invalid rank " + std::to_string(options.rank) +
                                       ", rank should be in the interval [0, " +
                                       std::to_string(options.num_replicas - 1) + "]");
  }
  if (dataset_size < 1)
    throw Error(ErrorKind::kValue, "a dataset of " + std::to_string(dataset_size) + " samples has none to share out");
  sample_count_ = dataset_size / options.num_replicas;
  if (!options.drop_last && dataset_size % options.num_replicas != 0) ++sample_count_;
}

void DistributedSampler::begin_epoch(int64_t) {
  std::vector<int64_t> order(static_cast<size_t>(dataset_size_));
  if (options_.shuffle) {
    auto generator = at::detail::createCPUGenerator(options_.seed + static_cast<uint64_t>(epoch_));
    const at::Tensor permutation =
        at::randperm(dataset_size_, generator, at::TensorOptions().dtype(at::kLong).device(at::kCPU));
    std::copy_n(permutation.const_data_ptr<int64_t>(), order.size(), order.begin());
  } else {
    std::iota(order.begin(), order.end(), int64_t{0});
  }
  // The samples beyond the last are the first ones once more, as in Python.
  indices_.clear();
  for (int64_t place = options_.rank; place < sample_count_ * options_.num_replicas; place += options_.num_replicas)
    indices_.push_back(order[static_cast<size_t>(place % dataset_size_)]);
  position_ = 0;
}

std::optional<std::vector<int64_t>> DistributedSampler::next(int64_t batch_size) {
  const size_t count = std::min(indices_.size() - position_, static_cast<size_t>(batch_size));
  if (count == 0) return std::nullopt;
  const auto first = indices_.begin() + static_cast<int64_t>(position_);
  position_ += count;
  return std::vector<int64_t>(first, first + static_cast<int64_t>(count));
}

}  // namespace penstock
