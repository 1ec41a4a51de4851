// SPDX-License-Identifier: Apache-2.0
#pragma once
// Facts about a batch, and about the request for one, that are the same for all makers: a local worker, or a pool
// worker and the job's process in it. PROTOCOL.md is the specification.

#include <chrono>
#include <cstdint>

namespace penstock::wire {

// The format of a request's indices.
enum class IndexKind : uint8_t {
  kNone = 0,
  kInteger = 1,   // one int64: a single sample, batch_size=None
  kIntegers = 2,  // int64 each: a list of integers
  kPickle = 3,    // anything else, pickled by the trainer
};

// A request for a batch, without its indices.
struct BatchRequest {
  IndexKind index_kind = IndexKind::kNone;
  uint64_t sequence = 0;  // the number of the batch in its epoch
  uint32_t epoch = 0;
  uint32_t shard_id = 0;
  uint64_t epoch_seed = 0;   // together with the sequence, it seeds the random draws of prefixes for the batch
  uint64_t first_place = 0;  // the place of its first sample in the order of the epoch, from 0
};

// Flags of a batch.
constexpr uint8_t kBatchRaises = 1;       // it is an ExceptionWrapper; raise its exception instead
constexpr uint8_t kBatchThreadsDrew = 4;  // samples drew random numbers that cannot be reproduced
constexpr uint8_t kBatchHasState = 8;     // the nest is a pair of the batch and its dataset's state
constexpr uint8_t kBatchCompiled = 16;    // compiled code produced some of its boundary tensors
// As far as is detectable, the batches that the worker made so far have left its dataset unchanged. Another worker may
// make the same batch again without observable effects.
constexpr uint8_t kBatchDatasetStays = 32;
constexpr uint8_t kBatchFlags = kBatchRaises | kBatchThreadsDrew | kBatchHasState | kBatchCompiled | kBatchDatasetStays;

// The unit of times. Times saturate at 32 bits, or 429 s.
constexpr std::chrono::nanoseconds kTimeUnit{100};
uint32_t time_units(std::chrono::nanoseconds time);

// The unit of a share of a time.
constexpr uint32_t kShareUnit = 65535;
uint16_t share_units(std::chrono::nanoseconds part, std::chrono::nanoseconds whole);

// The time spent on the samples of a batch, before they were collated.
struct SampleTimes {
  uint32_t dataset_time = 0;   // for all samples, in units of kTimeUnit
  uint16_t slowest_place = 0;  // position in the batch of the sample that took longest
  uint16_t slowest_share = 0;  // that sample's part of dataset_time, in units of 1 / kShareUnit; 0: unknown
};

// A trainer's facts about a batch, apart from its content. A value type.
struct BatchFacts {
  uint8_t flags = 0;
  bool is_transient = false;  // its arena was made only for it and is not reused
  uint64_t sequence = 0;
  uint32_t epoch = 0;
  uint32_t worker_id = 0;
  uint32_t record_bytes = 0;   // of the batch record
  uint64_t record_offset = 0;  // its start in the slab
  uint64_t slab_bytes = 0;     // bytes of the slab that are backed by memory
  uint32_t fetch_time = 0;     // from the request's arrival at the worker to its answer, in units of kTimeUnit
  uint32_t prefix_time = 0;    // the part for boundary tensors: computing them and writing the batch that contains them
  SampleTimes samples{};       // within fetch_time
};

}  // namespace penstock::wire
