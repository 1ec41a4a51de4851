// SPDX-License-Identifier: Apache-2.0
#pragma once
// The datasets that C++ programs write: by index (Dataset), or as streams of samples (IterableDataset).

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

// The random numbers of a sample, which belong to its place in the stream: they are the same for any number of workers,
// of threads and of processes. The generators live as long as the call that they are passed to. Draws from torch's
// default generator are not covered.
class PENSTOCK_API Draws {
 public:
  Draws() = default;
  Draws(const Draws&) = delete;
  Draws& operator=(const Draws&) = delete;

  // Of this sample alone: seeded by the base seed, the epoch, the batch's number and the sample's place in the batch.
  // The same numbers as those of the generator that a Python dataset gets whose __getitem__ takes `generator`.
  virtual at::Generator& sample_generator() = 0;

  // Of the batch: its samples draw from it one after the other. The same numbers as those of torch's default generator
  // in a Python dataset with seeding="batch".
  virtual at::Generator& batch_generator() = 0;

 protected:
  ~Draws() = default;
};

// A dataset whose samples have indices, as torch.utils.data.Dataset. It lives as long as its loader: in the program's
// threads as the one object, and in each worker process as one of its own, made anew for each loader. So get() must
// give a sample by its index and its draws alone; what it keeps between calls is not the same everywhere. The samples
// of a batch are collated as by torch's default_collate: tensors are stacked along a new first dimension, numbers
// become a tensor (int64, float64 or bool), structs, dicts, tuples and lists are collated by part, and text becomes a
// list.
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

  // The number of samples. Asked for once, by the loader's constructor.
  virtual int64_t size() const = 0;

  // The sample of an index in [0, size()). Called by several threads at once unless clone() gives each its own. What it
  // throws is raised by the trainer's next step, in the place of the batch. A tensor that is returned is copied into
  // the batch, and may be one that the dataset keeps.
  virtual Value get(int64_t index, Draws& draws) = 0;

  // A whole batch, collated already, in the place of get() for each of its indices. Nothing, which is what this class
  // gives: get() is called.
  virtual std::optional<Value> get_batch(std::span<const int64_t> indices, Draws& draws);

  // A copy for one worker thread, for a dataset whose get() must not run twice at once. Null, which is what this class
  // gives: all threads call the same object.
  virtual std::shared_ptr<Dataset> clone() const;
};

// The part of an iterable dataset that one stream reads: of `count` parts the one with number `index`, from 0.
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

  // The next sample, or nothing at the end. draws.batch_generator() is that of the batch which the sample becomes part
  // of; there is one generator for all samples of a batch, so sample_generator() is the same one.
  virtual std::optional<Value> next(Draws& draws) = 0;

  // The place in the shard, of plain values: load() on a new stream of the same shard goes on from there. Nothing,
  // which is what this class gives: a resumed shard is read again up to its place.
  virtual std::optional<Value> state() const;
  virtual void load(const Value& state);
};

// A dataset that is a stream of samples, as torch.utils.data.IterableDataset.
class PENSTOCK_API IterableDataset {
 public:
  IterableDataset() = default;
  IterableDataset(const IterableDataset&) = default;
  IterableDataset& operator=(const IterableDataset&) = default;
  virtual ~IterableDataset();

  // A new pass over a shard. Called by several threads at once, for different shards.
  virtual std::unique_ptr<SampleStream> open(const Shard& shard, Draws& draws) = 0;
};

// Rows of tensors that lie in memory, as torch.utils.data.TensorDataset: sample i is {tensors[0][i], tensors[1][i],
// ...}. A batch is one copy of its rows.
class PENSTOCK_API TensorDataset : public Dataset {
 public:
  // All have the same first dimension, lie on the CPU and are contiguous in memory; throws kValue otherwise.
  explicit TensorDataset(std::vector<at::Tensor> tensors);

  int64_t size() const override;
  Value get(int64_t index, Draws& draws) override;
  const std::vector<at::Tensor>& tensors() const { return tensors_; }

 private:
  std::vector<at::Tensor> tensors_;
};

// A dataset of `size` samples that a function makes: of an index, or of an index and its draws. The function is called
// by several threads at once, and returns anything that has a Conversion.
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
