// SPDX-License-Identifier: Apache-2.0
#pragma once
// Adapters that let this library's loader read datasets and samplers of torch::data.
//
//   auto mnist = torch::data::datasets::MNIST("data").map(torch::data::transforms::Normalize<>(0.1307, 0.3081));
//   penstock::DataLoader loader(penstock::from_torch(std::move(mnist)), {.batch_size = 64, .num_workers = 4});
//   for (const penstock::Batch& batch : loader) {
//     auto [data, target] = batch.as<torch::data::Example<>>();

#include <torch/data/datasets/base.h>
#include <torch/data/example.h>
#include <torch/data/samplers/base.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "penstock/dataset.h"
#include "penstock/error.h"
#include "penstock/fields.h"
#include "penstock/sampler.h"

namespace penstock {

// An example is a tuple of its data and its target.
template <typename Data, typename Target>
struct Conversion<torch::data::Example<Data, Target>> {
  static Value to_value(torch::data::Example<Data, Target> example) {
    return Conversion<std::pair<Data, Target>>::to_value({std::move(example.data), std::move(example.target)});
  }
  static torch::data::Example<Data, Target> from_value(const Value& value, const std::string& where) {
    auto [data, target] = Conversion<std::pair<Data, Target>>::from_value(value, where);
    return {std::move(data), std::move(target)};
  }
};

// An example without a target is its data.
template <typename Data>
struct Conversion<torch::data::Example<Data, void>> {
  static Value to_value(torch::data::Example<Data, void> example) {
    return Conversion<Data>::to_value(std::move(example.data));
  }
  static torch::data::Example<Data, void> from_value(const Value& value, const std::string& where) {
    return {Conversion<Data>::from_value(value, where)};
  }
};

namespace detail {

template <typename T>
struct IsVector : std::false_type {};
template <typename T>
struct IsVector<std::vector<T>> : std::true_type {};

template <typename D>
concept TorchBatches = requires {
  typename D::BatchType;
  typename D::BatchRequestType;
};
template <typename D>
concept TorchByIndex = TorchBatches<D> && !D::is_stateful;
template <typename D>
concept TorchStateful = TorchBatches<D> && D::is_stateful;

// A stateless dataset, read by index. Each thread has its own copy, as with torch's loader.
template <TorchByIndex D>
class TorchDataset final : public Dataset {
 public:
  explicit TorchDataset(D dataset) : dataset_(std::move(dataset)) {}

  int64_t size() const override {
    const std::optional<size_t> size = dataset_.size();
    if (!size) throw Error(ErrorKind::kValue, "a torch::data dataset that is read by index must have a size()");
    return static_cast<int64_t>(*size);
  }

  Value get(int64_t index, Draws&) override {
    if constexpr (requires(D & dataset) { dataset.get(size_t{0}); })
      return to_value(dataset_.get(static_cast<size_t>(index)));
    auto batch = dataset_.get_batch(std::vector<size_t>{static_cast<size_t>(index)});
    if constexpr (IsVector<decltype(batch)>::value)
      return to_value(std::move(batch.at(0)));
    else
      return to_value(std::move(batch));
  }

  std::optional<Value> get_batch(std::span<const int64_t> indices, Draws&) override {
    if constexpr (IsVector<typename D::BatchType>::value) {
      return std::nullopt;  // examples, which the loader collates itself
    } else {
      return to_value(dataset_.get_batch(std::vector<size_t>(indices.begin(), indices.end())));
    }
  }

  std::shared_ptr<Dataset> clone() const override {
    if constexpr (std::is_copy_constructible_v<D>)
      return std::make_shared<TorchDataset>(dataset_);
    else
      return nullptr;
  }

 private:
  D dataset_;
};

// A stateful dataset: one stream, which is reset at the start of each epoch.
template <TorchStateful D>
class TorchStreams final : public IterableDataset {
 public:
  TorchStreams(D dataset, size_t batch_size)
      : dataset_(std::make_shared<D>(std::move(dataset))), batch_size_(batch_size) {}

  std::unique_ptr<SampleStream> open(const Shard& shard, Draws&) override {
    if (shard.count != 1) {
      throw Error(ErrorKind::kValue, "a stateful torch::data dataset is one stream, but the loader reads it in " +
                                         std::to_string(shard.count) + " shards; set Options::shards to 1");
    }
    dataset_->reset();
    return std::make_unique<Stream>(dataset_, batch_size_);
  }

 private:
  class Stream final : public SampleStream {
   public:
    Stream(std::shared_ptr<D> dataset, size_t batch_size) : dataset_(std::move(dataset)), batch_size_(batch_size) {}

    std::optional<Value> next(Draws&) override {
      using Content = typename D::BatchType::value_type;
      if constexpr (IsVector<Content>::value) {
        if (position_ == kept_.size()) {
          auto batch = dataset_->get_batch(batch_size_);
          if (!batch || batch->empty()) return std::nullopt;
          kept_ = std::move(*batch);
          position_ = 0;
        }
        return to_value(std::move(kept_[position_++]));
      } else {
        auto batch = dataset_->get_batch(batch_size_);
        if (!batch) return std::nullopt;
        return to_value(std::move(*batch));
      }
    }

   private:
    using Content = typename D::BatchType::value_type;
    using Kept = std::conditional_t<IsVector<Content>::value, Content, std::vector<int>>;

    std::shared_ptr<D> dataset_;  // shared with the dataset that opened this stream
    size_t batch_size_;
    Kept kept_;
    size_t position_ = 0;
  };

  std::shared_ptr<D> dataset_;  // shared with the streams
  size_t batch_size_;
};

template <typename S>
class TorchOrder final : public Sampler {
 public:
  explicit TorchOrder(S sampler) : sampler_(std::move(sampler)) {}

  void begin_epoch(int64_t) override { sampler_.reset(std::nullopt); }
  std::optional<std::vector<int64_t>> next(int64_t batch_size) override {
    const auto request = sampler_.next(static_cast<size_t>(batch_size));
    if (!request) return std::nullopt;
    return std::vector<int64_t>(request->begin(), request->end());
  }

 private:
  S sampler_;
};

}  // namespace detail

// A stateless torch::data dataset with its transforms. The loader collates the examples; a dataset that collates
// itself, such as one with the transform Stack, returns whole batches. As with torch's loader, its draws from torch's
// default generator are not reproducible with several threads.
template <detail::TorchByIndex D>
std::shared_ptr<Dataset> from_torch(D dataset) {
  return std::make_shared<detail::TorchDataset<D>>(std::move(dataset));
}

// A stateful dataset (a StreamDataset, a ChunkDataset), which the loader must read as one shard. It is asked for
// `batch_size` examples at a time. A dataset that collates itself returns each of its batches as one sample: set the
// loader's batch_size to std::nullopt then.
template <detail::TorchStateful D>
std::shared_ptr<IterableDataset> from_torch(D dataset, size_t batch_size = 1) {
  return std::make_shared<detail::TorchStreams<D>>(std::move(dataset), batch_size);
}

// A torch::data sampler, which is reset at the start of each epoch.
template <typename S>
requires(std::derived_from<S, torch::data::samplers::Sampler<>>) std::shared_ptr<Sampler> from_torch(S sampler) {
  return std::make_shared<detail::TorchOrder<S>>(std::move(sampler));
}

}  // namespace penstock
