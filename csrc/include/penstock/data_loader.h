// SPDX-License-Identifier: Apache-2.0
#pragma once
// The loader.

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>

#include "penstock/any_dataset.h"
#include "penstock/batch.h"
#include "penstock/export.h"
#include "penstock/options.h"
#include "penstock/state.h"

namespace penstock {

// Counts since the loader was made.
// Where the seconds of the program's steps went, added up. A step is from one batch to the next, and every second of it
// is in exactly one field.
struct StepTimes {
  uint64_t steps = 0;
  double compute_s = 0;  // the program had a batch and did not ask for the next one yet
  // Waiting for a batch, told apart by the batch that ended the wait.
  double dataset_s = 0;
  double collate_s = 0;  // with writing the batch to shared memory
  double prefix_s = 0;   // calls of an offloaded module
  double worker_s = 0;   // no worker had begun to make it
  double wire_s = 0;
  double device_s = 0;  // until it was pinned, or its copy to the device begun
  double order_s = 0;   // a later batch was here: in_order = false would end the wait
  double loader_s = 0;  // the loader's own work on the program's thread
};

struct Stats {
  uint64_t batches = 0;         // that the program was given
  uint64_t batch_bytes = 0;     // of their tensors
  double wait_s = 0;            // that the program waited for batches
  double fetch_s = 0;           // that workers took to make them, together
  uint64_t boundary = 0;        // batches that came with what an offloaded module needs of them
  uint64_t withheld_bytes = 0;  // of tensors that stayed with a pool's workers, since nobody reads them
  uint64_t recalled = 0;        // batches of which such tensors were read after all
  uint32_t ready = 0;           // batches that wait now
  uint32_t worker_count = 0;    // now
  StepTimes ledger{};
};

// Gives the batches of a dataset, epoch after epoch. Thread-compatible: for one thread of the trainer. The loader
// starts its workers at the first begin() and ends them when it is destroyed, which waits for the samples in the
// making. A fork of the program leaves the child without workers: the loader throws there, and destroying it does
// nothing.
//
//   penstock::DataLoader loader(Squares(), {.batch_size = 64, .shuffle = true, .num_workers = 4});
//   for (int epoch = 0; epoch < 10; ++epoch)
//     for (const penstock::Batch& batch : loader) train(batch.tensor());
class PENSTOCK_API DataLoader {
 public:
  // Throws Error of kind kValue for options that have no meaning together, and kUnsupported where the program was
  // compiled, or runs, with another torch than the library; the last argument is the one that it is compiled with.
  explicit DataLoader(AnyDataset dataset, Options options = {}, TorchVersion torch = {});
  ~DataLoader();
  DataLoader(DataLoader&&) noexcept;
  DataLoader& operator=(DataLoader&&) noexcept;

  // The batches of one epoch. An input iterator. It is of the epoch that begin() began, and throws kValue once another
  // epoch was begun.
  class PENSTOCK_API Iterator {
   public:
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using iterator_concept = std::input_iterator_tag;

    // Valid until the iterator moves on.
    const Batch& operator*() const { return batch_; }
    const Batch* operator->() const { return &batch_; }
    // Waits for the next batch. Throws what made it fail; the batch after it comes then.
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

  // Begins an epoch, or goes on in the one that a loaded state is of, and waits for its first batch.
  Iterator begin();
  std::default_sentinel_t end() const { return {}; }

  // The same without an iterator: begin_epoch(), and next() until it gives nothing.
  void begin_epoch();
  std::optional<Batch> next();

  // The batches of an epoch. Nothing for an iterable dataset and for a sampler that does not know its size.
  std::optional<int64_t> size() const;

  // The place in the stream, as of now: a loader with the same dataset and options that loads it gives the batches that
  // this one would give next. Throws kUnsupported with in_order = false and workers.
  State state() const;
  // Takes effect at the next begin(). Throws kValue for a state of a loader whose stream is another.
  void load_state(const State& state);

  Stats stats() const;

 private:
  friend struct LoaderAccess;
  class Impl;

  std::unique_ptr<Impl> impl_;
};

}  // namespace penstock
