// SPDX-License-Identifier: Apache-2.0
#pragma once
// The base classes of datasets written in C++: by index (Dataset), or as streams of samples (IterableDataset).

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "penstock/export.h"
#include "penstock/fields.h"
#include "penstock/value.h"

namespace penstock {

// The random numbers of a sample. They depend on the sample's place in the stream and are the same for any number of
// workers, threads and processes. The generators are valid during the call that they are passed to. Draws from torch's
// default generator are not covered.
class PENSTOCK_API Draws {
 public:
  Draws() = default;
  Draws(const Draws&) = delete;
  Draws& operator=(const Draws&) = delete;

  // For this sample only: seeded by the base seed, the epoch, the batch's index and the sample's position in the batch.
  // Gives the same numbers as the generator that a Python dataset receives if its __getitem__ takes `generator`.
  virtual at::Generator& sample_generator() = 0;

  // For the batch: its samples draw from it one after the other. Gives the same numbers as torch's default generator in
  // a Python dataset with seeding="batch".
  virtual at::Generator& batch_generator() = 0;

 protected:
  ~Draws() = default;
};

// A dataset whose samples have indices, like torch.utils.data.Dataset. It lives as long as its loader. The program's
// threads share the one object; each worker process creates its own instance for each loader. So get() must depend only
// on the index and the draws: state kept between calls differs between instances. The samples of a batch are collated
// as by torch's default_collate: tensors are stacked along a new first dimension, numbers become a tensor (int64,
// float64 or bool), structs, dicts, tuples and lists are collated part by part, and text becomes a list.
//
//   class Squares : public penstock::Dataset {
//    public:
//     int64_t size() const override { return 1000; }
//     penstock::Value get(int64_t index, penstock::Draws&) override { return at::full({3}, index * index); }
//   };
class PENSTOCK_API Dataset {
 public:
  Dataset() = default;
  Dataset(const Dataset&) = default;
  Dataset& operator=(const Dataset&) = default;
  virtual ~Dataset();

  // The number of samples. Called once, by the loader's constructor.
  virtual int64_t size() const = 0;

  // The sample with an index in [0, size()). Called by several threads at once unless clone() gives each its own
  // object. An exception thrown here is raised by the trainer's next step, instead of the batch. A returned tensor is
  // copied into the batch, so it may be one that the dataset keeps.
  virtual Value get(int64_t index, Draws& draws) = 0;

  // A whole batch, already collated, instead of one get() call per index. The default implementation returns no value:
  // get() is called.
  virtual std::optional<Value> get_batch(std::span<const int64_t> indices, Draws& draws);

  // A copy for one worker thread, for a dataset whose get() must not run concurrently. The default implementation
  // returns null: all threads use the same object.
  virtual std::shared_ptr<Dataset> clone() const;
};

// The part of an iterable dataset that one stream reads: part `index`, from 0, of `count` parts.
struct Shard {
  int64_t index = 0;
  int64_t count = 1;
};

// The samples of one shard in one epoch. Confined to one thread at a time.
class PENSTOCK_API SampleStream {
 public:
  SampleStream() = default;
  SampleStream(const SampleStream&) = delete;
  SampleStream& operator=(const SampleStream&) = delete;
  virtual ~SampleStream();

  // The next sample, or no value at the end. draws.batch_generator() is the generator of the batch that the sample will
  // be part of; all samples of a batch share it, and sample_generator() returns the same one.
  virtual std::optional<Value> next(Draws& draws) = 0;

  // The position in the shard, as plain values: load() on a new stream of the same shard continues from there. The
  // default implementation returns no value: a resumed shard is read again up to its position.
  virtual std::optional<Value> state() const;
  virtual void load(const Value& state);
};

// A dataset that is a stream of samples, like torch.utils.data.IterableDataset.
class PENSTOCK_API IterableDataset {
 public:
  IterableDataset() = default;
  IterableDataset(const IterableDataset&) = default;
  IterableDataset& operator=(const IterableDataset&) = default;
  virtual ~IterableDataset();

  // Starts a new pass over a shard. Called by several threads at once, for different shards.
  virtual std::unique_ptr<SampleStream> open(const Shard& shard, Draws& draws) = 0;
};

// Rows of in-memory tensors, like torch.utils.data.TensorDataset: sample i is {tensors[0][i], tensors[1][i], ...}. A
// batch is one copy of its rows.
class PENSTOCK_API TensorDataset : public Dataset {
 public:
  // All tensors must have the same first dimension, be on the CPU and be contiguous; throws kValue otherwise.
  explicit TensorDataset(std::vector<at::Tensor> tensors);

  int64_t size() const override;
  Value get(int64_t index, Draws& draws) override;
  const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  std::vector<at::Tensor> tensors_;
};

// A dataset of `size` samples returned by a function of an index, or of an index and its draws. The function is called
// by several threads at once and may return any type that has a Conversion.
//
//   auto dataset = penstock::make_dataset(1000, [](int64_t index) { return std::pair(at::full({3}, index), index); });
template <typename Function>
std::shared_ptr<Dataset> make_dataset(int64_t size, Function function) {
  class FunctionDataset final : public Dataset {
   public:
    FunctionDataset(int64_t size, Function function) : size_(size), function_(std::move(function)) {}
    int64_t size() const override { return size_; }
    Value get(int64_t index, Draws& draws) override {
      if constexpr (std::invocable<Function&, int64_t, Draws&>)
        return to_value(function_(index, draws));
      else
        return to_value(function_(index));
    }

   private:
    int64_t size_;
    Function function_;
  };
  return std::make_shared<FunctionDataset>(size, std::move(function));
}

}  // namespace penstock
