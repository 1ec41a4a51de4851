// SPDX-License-Identifier: Apache-2.0
#pragma once
// The data loader.

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>
#include <vector>

#include "penstock/any_dataset.h"
#include "penstock/batch.h"
#include "penstock/export.h"
#include "penstock/options.h"
#include "penstock/state.h"

namespace penstock {

// A breakdown of the time of the program's steps, in seconds, summed. A step lasts from one batch to the next, and each
// moment of it counts in exactly one field.
struct StepTimes {
  uint64_t steps = 0;
  double compute_s = 0;  // the program had a batch and had not asked for the next one yet
  // Waiting for a batch, attributed to the stage in which the awaited batch was.
  double dataset_s = 0;
  double collate_s = 0;  // including writing the batch to shared memory
  double prefix_s = 0;   // calls that penstock::offload moved
  double worker_s = 0;   // no worker had started to make it
  double wire_s = 0;
  double device_s = 0;  // until it was pinned, or its copy to the device was started
  double order_s = 0;   // a later batch was ready: in_order = false or a number would end the wait
  double loader_s = 0;  // work of the loader on the program's thread
};

// Counts since the loader was created.
struct Stats {
  uint64_t batches = 0;         // delivered to the program
  uint64_t batch_bytes = 0;     // in their tensors
  double wait_s = 0;            // time that the program waited for batches
  double fetch_s = 0;           // time that workers took to make them, summed over workers
  uint64_t boundary = 0;        // batches that arrived with the tensors that an offloaded module needs
  uint64_t withheld_bytes = 0;  // in tensors that stayed with pool workers because the program does not read them
  uint64_t recalled = 0;        // batches whose withheld tensors were read after all
  uint32_t ready = 0;           // batches that are waiting now
  uint32_t worker_count = 0;    // now
  StepTimes ledger{};
};

// Delivers the batches of a dataset, epoch after epoch. Thread-compatible: for one thread of the trainer. The loader
// starts its workers at the first begin() and stops them when it is destroyed, which waits for the samples in progress.
// In a forked child the loader has no workers: its calls throw, and destroying it has no effect.
//
//   penstock::DataLoader loader(Squares(), {.batch_size = 64, .shuffle = true, .num_workers = 4});
//   for (int epoch = 0; epoch < 10; ++epoch)
//     for (const penstock::Batch& batch : loader) train(batch.tensor());
class PENSTOCK_API DataLoader {
 public:
  // Throws an Error of kind kValue for invalid or conflicting options, and of kind kUnsupported if the program was
  // compiled with, or runs with, a different torch than the library. `torch` defaults to the version that the program
  // is compiled with.
  explicit DataLoader(AnyDataset dataset, Options options = {}, TorchVersion torch = {});
  ~DataLoader();
  DataLoader(DataLoader&&) noexcept;
  DataLoader& operator=(DataLoader&&) noexcept;

  // An input iterator over the batches of the epoch that begin() started. Throws kValue once another epoch has been
  // started.
  class PENSTOCK_API Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using iterator_concept = std::input_iterator_tag;

    // Valid until the iterator advances.
    const Batch& operator*() const { return batch_; }
    const Batch* operator->() const { return &batch_; }
    // Waits for the next batch. If that batch failed, throws its error; the next call then delivers the batch after it.
    Iterator& operator++();
    void operator++(int) { ++*this; }
    friend bool operator==(const Iterator& iterator, std::default_sentinel_t) { return iterator.is_at_end_; }

   private:
    friend class DataLoader;
    Iterator(DataLoader& loader, uint64_t epoch) : loader_(&loader), epoch_(epoch) {}

    DataLoader* loader_;
    uint64_t epoch_;
    bool is_at_end_ = false;
    Batch batch_;
  };

  // Starts an epoch, or resumes the epoch of a loaded state, and waits for its first batch.
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

  // The same without an iterator: call begin_epoch(), then next() until it returns no batch.
  void begin_epoch();
  std::optional<Batch> next();

  // The number of batches in an epoch; no value for an iterable dataset or a sampler of unknown size.
  std::optional<int64_t> size() const;

  // The current position in the stream: a loader with the same dataset and options that loads it delivers the batches
  // that this one would deliver next. With Options::commit, it delivers all batches that are not committed. The options
  // of delivery (num_workers, in_order, pool) may differ. Throws kUnsupported with shard_by_rank and workers, unless
  // in_order is true or the steps are committed.
  State state() const;
  // Takes effect at the next begin(). Throws kValue for the state of a loader with a different stream.
  void load_state(const State& state);

  // Continues as another rank, or with another number of ranks, from the next batch on. Call this between two batches,
  // on each rank of the new size and after the same step: the epoch and its iterator continue, and the ranks share the
  // samples that no rank has been given, as ranks of that size would that resume from the state of this step. The
  // workers and the connection to a pool stay; batches that they have made ahead are dropped and made again by the rank
  // that needs them. Between two epochs, the numbers apply to the next epoch. A `sampler` starts the epoch again, as
  // after load_state().
  //
  // A rank that joins is created with the new numbers and loads the state of any old rank at this step. A rank that
  // leaves destroys its loader. Ranks in C++ do not compare their numbers and positions.
  //
  // Throws kValue for impossible numbers, and kUnsupported without Options::shard_by_rank, with workers unless in_order
  // is true or the steps are committed, and while delivered steps are not committed. The loader then continues as it
  // was. If the program's sampler throws, the next begin() resumes the epoch at the old size.
  //
  //   for (const penstock::Batch& batch : loader) {
  //     train(batch.tensor());
  //     if (group.has_changed()) loader.reshard(group.rank(), group.size());
  //   }
  void reshard(int64_t rank, int64_t world_size);
  // The same from `state` on, which must be the same on all ranks. An earlier state repeats the steps after it, for
  // example a step in which a rank has died.
  void reshard(int64_t rank, int64_t world_size, const State& state);

  // Notes that the program is done with a batch: no resumed loader delivers it again. Batches may be committed in any
  // order and from any thread. Throws kValue if the batch is committed already, was delivered by another loader or
  // before load_state(), and kUnsupported without Options::commit.
  //
  //   penstock::DataLoader loader(prompts, {.batch_size = 8, .num_workers = 4, .commit = penstock::Commit::kManual});
  //   for (const penstock::Batch& batch : loader)
  //     if (step(batch)) loader.commit(batch);  // some steps are refused
  void commit(const Batch& batch);
  void commit(const BatchId& id);
  // The batches that were delivered and not committed, the oldest epoch's first. From any thread; empty without
  // Options::commit.
  std::vector<BatchId> outstanding() const;

  // The uncommitted batches of earlier epochs. After load_state(), the next begin() delivers them before it continues
  // with the epoch of the state. A program whose last epoch was over starts no other epoch: it iterates these.
  class Redelivery {
   public:
    Iterator begin() const { return loader_->first_of_redelivery(); }
    std::default_sentinel_t end() const { return {}; }

   private:
    friend class DataLoader;
    explicit Redelivery(DataLoader& loader) : loader_(&loader) {}

    DataLoader* loader_;
  };
  // Throws kUnsupported without Options::commit.
  Redelivery redeliver();
  // The same without an iterator: call next() until it returns no batch.
  void begin_redelivery();

  Stats stats() const;

 private:
  friend struct LoaderAccess;
  class Impl;

  Iterator first();
  Iterator first_of_redelivery();

  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock
