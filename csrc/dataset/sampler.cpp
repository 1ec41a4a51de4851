// SPDX-License-Identifier: Apache-2.0
#include "penstock/sampler.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>

#include <algorithm>
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
    throw Error(ErrorKind::kValue, "a dataset of " + std::to_string(dataset_size) + " samples has none to distribute");
  sample_count_ = dataset_size / options.num_replicas;
  if (!options.drop_last && dataset_size % options.num_replicas != 0) ++sample_count_;
  position_ = sample_count_;
}

void DistributedSampler::begin_epoch(int64_t) {
  position_ = 0;
  indices_.clear();
  if (!options_.shuffle) return;  // an index is its place
  auto generator = at::detail::createCPUGenerator(options_.seed + static_cast<uint64_t>(epoch_));
  const at::Tensor permutation =
      at::randperm(dataset_size_, generator, at::TensorOptions().dtype(at::kLong).device(at::kCPU));
  const auto* order = permutation.const_data_ptr<int64_t>();
  indices_.reserve(static_cast<size_t>(sample_count_));
  for (int64_t number = 0; number < sample_count_; ++number) indices_.push_back(order[place_of(number)]);
}

std::optional<std::vector<int64_t>> DistributedSampler::next(int64_t batch_size) {
  const int64_t count = std::min(sample_count_ - position_, batch_size);
  if (count <= 0) return std::nullopt;
  std::vector<int64_t> batch(static_cast<size_t>(count));
  for (int64_t& index : batch) {
    index = options_.shuffle ? indices_[static_cast<size_t>(position_)] : place_of(position_);
    ++position_;
  }
  return batch;
}

int64_t DistributedSampler::place_of(int64_t number) const {
  // Places beyond the last sample repeat the first samples, as in Python.
  const auto place = static_cast<uint64_t>(options_.rank) +
                     static_cast<uint64_t>(number) * static_cast<uint64_t>(options_.num_replicas);
  return static_cast<int64_t>(place % static_cast<uint64_t>(dataset_size_));
}

}  // namespace penstock
