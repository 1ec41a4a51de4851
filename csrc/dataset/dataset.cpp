// SPDX-License-Identifier: Apache-2.0
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/randperm.h>

#include <algorithm>
#include <string>
#include <utility>

#include "penstock/dataset.h"
#include "penstock/error.h"
#include "penstock/sampler.h"

namespace penstock {

Dataset::~Dataset() = default;
std::optional<Value> Dataset::get_batch(std::span<const int64_t>, Draws&) { return std::nullopt; }
std::shared_ptr<Dataset> Dataset::clone() const { return nullptr; }

SampleStream::~SampleStream() = default;
std::optional<Value> SampleStream::state() const { return std::nullopt; }
void SampleStream::load(const Value&) {
  throw Error(
      ErrorKind::kUnsupported,
      "a SampleStream with a state() must have a load(); override both, or neither to have the stream read again");
}

IterableDataset::~IterableDataset() = default;

TensorDataset::TensorDataset(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  if (tensors_.empty()) throw Error(ErrorKind::kValue, "TensorDataset requires at least one tensor, got none");
  for (const at::Tensor& tensor : tensors_) {
    const bool has_rows = tensor.defined() && tensor.layout() == at::kStrided && tensor.dim() > 0 &&
                          tensor.device().is_cpu() && tensor.is_contiguous();
    if (!has_rows) {
      throw Error(
          ErrorKind::kValue,
          "TensorDataset requires contiguous CPU tensors with at least one dimension; call cpu() or contiguous()");
    }
    if (tensor.size(0) != tensors_.front().size(0)) {
      throw Error(ErrorKind::kValue, "Size mismatch between tensors: TensorDataset was given tensors of " +
                                         std::to_string(tensors_.front().size(0)) + " and of " +
                                         std::to_string(tensor.size(0)) + " rows");
    }
  }
}

int64_t TensorDataset::size() const { return tensors_.front().size(0); }

Value TensorDataset::get(int64_t index, Draws&) {
  Value::Items items;
  for (const at::Tensor& tensor : tensors_) items.emplace_back(tensor.select(0, index));
  return Value::tuple(std::move(items));
}

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

Error::Error(ErrorKind kind, const std::string& text, std::exception_ptr cause)
    : std::runtime_error(text), kind_(kind), cause_(std::move(cause)) {}
Error::Error(const Error&) noexcept = default;
Error& Error::operator=(const Error&) noexcept = default;
Error::~Error() = default;

}  // namespace penstock
