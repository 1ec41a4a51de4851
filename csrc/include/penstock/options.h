// SPDX-License-Identifier: Apache-2.0
#pragma once
// The options of a loader. Their names and meanings are those of the Python package's DataLoader; see
// docs/reference/options.md for each at length.

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
#include <vector>

#include "penstock/sampler.h"
#include "penstock/value.h"

namespace penstock {

// With shard_by_rank, what becomes of the samples that do not fill the last step of an epoch.
enum class Remainder : uint8_t {
  kPad,     // the ranks share them evenly, and some of them are given twice to make that so
  kDrop,    // they are left out
  kUneven,  // the ranks share them, some one more than others, and may have batches of different sizes in every step;
            // as kPad where there are fewer samples than ranks
};

// In Python's order, for designated initialisers:
//
//   penstock::DataLoader loader(dataset, {.batch_size = 64, .shuffle = true, .num_workers = 4});
//
// Python's batch_sampler is `sampler` here, since a sampler may ignore the batch size. Random draws always belong to
// batches and samples, as with Python's seeding="batch", or "sample" with shard_by_rank (Draws in dataset.h). The
// workers stay for as long as the loader does, as with persistent_workers=True.
struct Options {
  // Samples in a batch. std::nullopt: each sample is a batch of its own, and is not collated.
  std::optional<int64_t> batch_size = 1;
  // A new permutation of the samples for each epoch, that of Python's RandomSampler.
  bool shuffle = false;
  // The order of samples, in the place of `shuffle`. Shared with the program, which may go on using it between epochs.
  std::shared_ptr<Sampler> sampler = {};
  // For a dataset of this program: threads that make batches. 0: the trainer's own thread makes each batch when it is
  // asked for. For a plug-in or a Python dataset: processes of this machine, which with `pool` serve beside it.
  int64_t num_workers = 0;
  // Makes a batch of samples, in the place of torch's default_collate. Called by several threads at once.
  std::function<Value(std::vector<Value>)> collate_fn = {};
  // Delivers each batch in pinned memory.
  bool pin_memory = false;
  // Leaves out the last batch if it is short.
  bool drop_last = false;
  // How long next() waits for a batch before it throws kTimeout. 0: for ever.
  std::chrono::milliseconds timeout{0};
  // Draws the base seed and the permutations, in the place of torch's default generator. A handle: it moves on.
  std::optional<at::Generator> generator = {};
  // Batches that each worker is asked for ahead.
  int64_t prefetch_factor = 2;
  // false: batches come in the order in which they are ready.
  bool in_order = true;
  // Batches arrive on this device, copied on a side stream ahead of use.
  std::optional<c10::Device> device = {};
  // Of an iterable dataset: in how many shards it is read. The stream follows from this number and not from
  // num_workers. std::nullopt: one a worker.
  std::optional<int64_t> shards = {};
  // The most bytes of batches that are asked for ahead. 0: no bound beside prefetch_factor.
  int64_t prefetch_bytes = 0;
  // "tcp://host:port", the address of a pool's controller. std::nullopt: the environment's PENSTOCK_POOL, if the
  // dataset is one that a pool can serve. Empty: none.
  std::optional<std::string> pool = {};
  // The folder with the keys for the pool. Empty: PENSTOCK_KEYS, else the keys that this user's processes share.
  std::string keys = {};
  // Gives this process its part of one order that knows no ranks, of a map-style dataset. A step takes the next samples
  // of the order, and each rank a run of them. Every rank has the same number of steps. The order and all random
  // numbers are the same for any number of ranks, and so is the state: any rank's says where the job is, and a job of
  // another size, in C++ or in Python, goes on from it. Without a `generator` the order follows from seed 0; one that
  // is given has to be in the same state on all ranks. A `sampler` is the order of all ranks, and has a size().
  bool shard_by_rank = false;
  // This process, of so many, from 0. std::nullopt: the environment's RANK and WORLD_SIZE, as torchrun sets them, else
  // 0 of 1.
  std::optional<int64_t> rank = {};
  std::optional<int64_t> world_size = {};
  // The samples of a step over all ranks, in the place of batch_size, which is that of one rank.
  std::optional<int64_t> global_batch_size = {};
  // std::nullopt: kDrop with drop_last, else kPad.
  std::optional<Remainder> remainder = {};
  // Run on every batch where it is made: its forward takes the batch's parts, and its result is the batch. It must not
  // draw random numbers in threads of this process.
  std::optional<torch::jit::Module> transform = {};
};

}  // namespace penstock
