// SPDX-License-Identifier: Apache-2.0
#pragma once
// The options of a loader. Names and meanings match the Python package's DataLoader; docs/reference/options.md
// describes each in detail.

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/jit/api/module.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "penstock/sampler.h"
#include "penstock/value.h"

namespace penstock {

// With shard_by_rank: how to handle the samples that do not fill the last step of an epoch.
enum class Remainder : uint8_t {
  kPad,     // shared evenly by the ranks, with some samples repeated to make this possible
  kDrop,    // dropped
  kUneven,  // shared by the ranks, some with one sample more; batch sizes may differ in every step;
            // as kPad if there are fewer samples than ranks
};

// The batches that the state of a loader covers.
enum class Commit : uint8_t {
  kNone,    // the batches that were delivered
  kManual,  // the batches that the program passed to DataLoader::commit(), in any order
};

// In Python's order, for designated initialisers:
//
//   penstock::DataLoader loader(dataset, {.batch_size = 64, .shuffle = true, .num_workers = 4});
//
// Python's batch_sampler corresponds to `sampler` here, since a sampler may ignore the batch size. Random draws always
// belong to batches and samples, as with Python's seeding="batch", or "sample" with shard_by_rank (Draws in dataset.h).
// The workers live as long as the loader, as with persistent_workers=True.
struct Options {
  // Samples per batch. std::nullopt: each sample is delivered as a batch, uncollated.
  std::optional<int64_t> batch_size = 1;
  // Draws a new permutation of the samples for each epoch, the same as Python's RandomSampler.
  bool shuffle = false;
  // The order of samples, instead of `shuffle`. Shared with the program, which may keep using it between epochs.
  std::shared_ptr<Sampler> sampler = {};
  // For a dataset object of this program: the number of threads that make batches. 0: the trainer's thread makes each
  // batch on request. For a plug-in or a Python dataset: the number of processes on this machine, which serve alongside
  // those of `pool`.
  int64_t num_workers = 0;
  // Makes a batch from samples, instead of torch's default_collate. Called by several threads at once.
  std::function<Value(std::vector<Value>)> collate_fn = {};
  // Delivers each batch in pinned memory.
  bool pin_memory = false;
  // Drops the last batch if it is short.
  bool drop_last = false;
  // How long next() waits for a batch before it throws kTimeout. 0: no limit.
  std::chrono::milliseconds timeout{0};
  // Draws the base seed and the permutations, instead of torch's default generator. It is a handle: drawing advances
  // the caller's generator.
  std::optional<at::Generator> generator = {};
  // The number of batches requested ahead from each worker.
  int64_t prefetch_factor = 2;
  // true: batches are delivered in the order of the sampler. false: in the order in which they become ready. A number,
  // from 2: a ready batch is delivered as long as at most so many batches have overtaken the oldest one.
  std::variant<bool, int64_t> in_order = true;
  // Batches are delivered on this device, copied ahead of use on a side stream.
  std::optional<c10::Device> device = {};
  // For an iterable dataset: the number of shards it is read in. The stream depends on this number and not on
  // num_workers. std::nullopt: one per worker.
  std::optional<int64_t> shards = {};
  // The maximum total size of the batches requested ahead. 0: limited by prefetch_factor only.
  int64_t prefetch_bytes = 0;
  // kManual, for a map-style dataset: a resumed loader delivers the batches that were delivered and not committed
  // again, once each, before the others. With shard_by_rank, all ranks commit the same steps, and a job of any number
  // of ranks resumes. Python's commit="auto" has no counterpart, since the optimizers of torch's C++ library do not
  // report their steps.
  Commit commit = Commit::kNone;
  // "tcp://host:port", the address of a pool's controller. std::nullopt: the environment's PENSTOCK_POOL, if a pool can
  // serve the dataset. Empty: no pool.
  std::optional<std::string> pool = {};
  // The folder with the keys for the pool. Empty: PENSTOCK_KEYS, else the keys that this user's processes share.
  std::string keys = {};
  // For a map-style dataset: gives this process its share of one global order that does not depend on the ranks. Each
  // step takes the next samples of the order, and each rank a contiguous run of them. Every rank has the same number of
  // steps. The order, all random numbers and the state are the same for any number of ranks: each rank's state holds
  // the position of the whole job, and a job of another size, in C++ or in Python, can resume from it. Without a
  // `generator` the order is drawn from seed 0; a given generator must be in the same state on all ranks. A `sampler`
  // defines the order of all ranks and must have a size().
  bool shard_by_rank = false;
  // This process's rank, from 0, and the number of ranks. std::nullopt: the environment's RANK and WORLD_SIZE, as set
  // by torchrun, else 0 of 1.
  std::optional<int64_t> rank = {};
  std::optional<int64_t> world_size = {};
  // The number of samples per step over all ranks, instead of batch_size, which is per rank.
  std::optional<int64_t> global_batch_size = {};
  // std::nullopt: kDrop with drop_last, else kPad.
  std::optional<Remainder> remainder = {};
  // Runs on every batch where the batch is made: its forward takes the batch's parts, and its result becomes the batch.
  // It must not draw random numbers in threads of this process.
  std::optional<torch::jit::Module> transform = {};
};

}  // namespace penstock
