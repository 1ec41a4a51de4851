// SPDX-License-Identifier: Apache-2.0
#pragma once
// Facts about a batch, and about the request for one, that cross whoever makes it: a local worker, or a worker of a
// pool and the process of a job in it. PROTOCOL.md is the specification.

#include <chrono>
#include <cstdint>

namespace penstock::wire {

// How the indices of a request are written.
enum class IndexKind : uint8_t {
  kNone = 0,
  kInteger = 1,   // one int64: a single sample, batch_size=None
  kIntegers = 2,  // int64 each: a list of integers
  kPickle = 3,    // anything else, pickled by the trainer
};

// A request for a batch, but for its indices.
struct BatchRequest {
  IndexKind index_kind = IndexKind::kNone;
  uint64_t sequence = 0;  // the number of the batch in its epoch
  uint32_t epoch = 0;
  uint32_t shard_id = 0;
  uint64_t epoch_seed = 0;   // the draws of prefixes for the batch follow from it and the sequence
  uint64_t first_place = 0;  // the place of its first sample in the order of the epoch, from 0
};

// Flags of a batch.
constexpr uint8_t kBatchRaises = 1;       // it is an ExceptionWrapper to be raised in its place
constexpr uint8_t kBatchThreadsDrew = 4;  // samples drew random numbers that nothing can reproduce
constexpr uint8_t kBatchHasState = 8;     // the nest is a pair of the batch and of its dataset's state
constexpr uint8_t kBatchCompiled = 16;    // compiled code made boundary tensors of it
// As far as a look can tell, the batches that the worker made so far have left its dataset as it was. Another worker
// may make the same batch once more, and nobody will see it.
constexpr uint8_t kBatchDatasetStays = 32;
constexpr uint8_t kBatchFlags = kBatchRaises | kBatchThreadsDrew | kBatchHasState | kBatchCompiled | kBatchDatasetStays;

// The unit of times. Their 32 bits end at 429 s.
constexpr std::chrono::nanoseconds kTimeUnit{100};
uint32_t time_units(std::chrono::nanoseconds time);

// The unit of a share of a time.
constexpr uint32_t kShareUnit = 65535;
uint16_t share_units(std::chrono::nanoseconds part, std::chrono::nanoseconds whole);

// The time that the samples of a batch took, before a batch was made of them.
struct SampleTimes {
  uint32_t dataset_time = 0;   // of all, in units of kTimeUnit
  uint16_t slowest_place = 0;  // in the batch, of the sample that took longest
  uint16_t slowest_share = 0;  // of dataset_time, for that sample, in parts of kShareUnit; 0: not known
};

// What a trainer knows of a batch beside its content. A value type.
struct BatchFacts {
  uint8_t flags = 0;
  bool is_transient = false;  // its arena was made for it alone and is not used again
  uint64_t sequence = 0;
  uint32_t epoch = 0;
  uint32_t worker_id = 0;
  uint32_t record_bytes = 0;   // the batch record
  uint64_t record_offset = 0;  // where it begins in the slab
  uint64_t slab_bytes = 0;     // bytes of the slab that are backed by memory
  uint32_t fetch_time = 0;     // from the request's arrival at the worker to its answer, in units of kTimeUnit
  uint32_t prefix_time = 0;    // of it, on boundary tensors: computing them and writing the batch they travel in
  SampleTimes samples{};       // within fetch_time
};

}  // namespace penstock::wire
