// SPDX-License-Identifier: Apache-2.0
#pragma once
// The two fixed records that a trainer and its workers exchange: a request goes to a worker, a descriptor comes back.
// A request has 64 bytes and a descriptor 72, little-endian. Their variable bytes, if any, follow in the same message
// of the channel (shm/channel.h). PROTOCOL.md is the specification.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"

namespace penstock::wire {

constexpr uint32_t kRequestMagic = 0x31524e50;     // "PNR1"
constexpr uint32_t kDescriptorMagic = 0x31444e50;  // "PND1"
constexpr uint16_t kMessageVersion = 4;
constexpr uint64_t kRequestBodyBytesMax = uint64_t{1} << 32;

enum class RequestKind : uint8_t {
  kFetch = 1,           // make one batch; the body holds its indices
  kEpoch = 2,           // a new epoch begins: make the fetcher again; the body has the epoch's seeds
  kPrefix = 3,          // run this prefix on every later batch; the body is an encoded batch record and payload
  kRemovePrefixes = 4,  // forget all prefixes
  kEarlyEpoch = 5,      // fetches of the next epoch follow although it may never begin; the body is as for kEpoch
  kStates = 6,          // send the dataset's state with batches from now on; the body is how often, and a question or 0
};

// How the indices of a fetch are written in its body.
enum class IndexKind : uint8_t {
  kNone = 0,
  kInteger = 1,   // one int64: a single sample, batch_size=None
  kIntegers = 2,  // int64 each: a list of integers
  kPickle = 3,    // anything else, pickled by the trainer
};

struct Request {
  uint32_t magic = kRequestMagic;
  uint16_t version = kMessageVersion;
  RequestKind kind = RequestKind::kFetch;
  IndexKind index_kind = IndexKind::kNone;
  uint64_t sequence = 0;
  uint64_t body_bytes = 0;
  uint32_t epoch = 0;
  uint32_t shard_id = 0;
  uint64_t epoch_seed = 0;   // of a fetch: the draws of prefixes for its batch follow from it and the sequence
  uint64_t first_place = 0;  // of a fetch: the place of its first sample in the order of the epoch, from 0
  uint64_t reserved[2] = {};
};
static_assert(sizeof(Request) == 64);

enum class DescriptorKind : uint8_t {
  kHello = 1,   // the first message of a worker: it can take requests
  kSlab = 2,    // a batch in a slab
  kInline = 3,  // a batch whose record and then its payload follow this descriptor
  kEnd = 4,     // this worker's share of an iterable dataset is exhausted; the state of its dataset follows, if any
  kStates = 5,  // the states of the worker's shards follow: the answer to a request of that name
};

constexpr uint8_t kDescriptorRaises = 1;       // flag: the batch is an ExceptionWrapper to be raised in its place
constexpr uint8_t kDescriptorTransient = 2;    // flag: the arena was made for this batch alone and is not used again
constexpr uint8_t kDescriptorThreadsDrew = 4;  // flag: samples drew random numbers that nothing can reproduce
constexpr uint8_t kDescriptorHasState = 8;     // flag: the nest is a pair of the batch and of its dataset's state
constexpr uint8_t kDescriptorCompiled = 16;    // flag: compiled code made boundary tensors of it
// Flag: as far as a look can tell, the batches that the worker made so far have left its dataset as it was. Another
// worker may make the same batch once more, and nobody will see it.
constexpr uint8_t kDescriptorDatasetStays = 32;
// Flag: the arena is new to the trainer, and its file descriptor comes along, before those of shared files.
constexpr uint8_t kDescriptorNewArena = 64;
constexpr uint8_t kDescriptorFlags = kDescriptorRaises | kDescriptorTransient | kDescriptorThreadsDrew |
                                     kDescriptorHasState | kDescriptorCompiled | kDescriptorDatasetStays |
                                     kDescriptorNewArena;

// The unit of the times in a descriptor. Their 32 bits end at 429 s.
constexpr std::chrono::nanoseconds kTimeUnit{100};
uint32_t time_units(std::chrono::nanoseconds time);

// The unit of a share of a time.
constexpr uint32_t kShareUnit = 65535;
uint16_t share_units(std::chrono::nanoseconds part, std::chrono::nanoseconds whole);

// What a batch's samples took, before a batch was made of them.
struct SampleTimes {
  uint32_t dataset_time = 0;   // of all, in units of kTimeUnit
  uint16_t slowest_place = 0;  // in the batch, of the sample that took longest
  uint16_t slowest_share = 0;  // of dataset_time, for that sample, in parts of kShareUnit; 0: not known
};

struct Descriptor {
  uint32_t magic = kDescriptorMagic;
  uint16_t version = kMessageVersion;
  DescriptorKind kind = DescriptorKind::kHello;
  uint8_t flags = 0;
  uint64_t sequence = 0;
  uint32_t epoch = 0;
  uint32_t worker_id = 0;
  uint32_t arena_id = 0;
  uint32_t slab_index = 0;
  uint32_t slab_generation = 0;
  uint32_t record_bytes = 0;   // the batch record
  uint64_t record_offset = 0;  // where it lies in the slab
  uint64_t slab_bytes = 0;     // bytes of the slab that are backed by memory
  uint32_t fetch_time = 0;     // from the request's arrival at the worker to this message, in units of kTimeUnit
  uint32_t prefix_time = 0;    // of it, on boundary tensors: computing them and writing the batch they travel in
  SampleTimes samples{};       // within fetch_time
};
static_assert(sizeof(Descriptor) == 72);

// Reads what `bytes` begin with, checking magic, version, kind and reserved bytes, and the length of what follows.
Result<Request> parse_request(std::span<const std::byte> bytes);
Result<Descriptor> parse_descriptor(std::span<const std::byte> bytes);

// A record followed by its body.
template <typename Record>
std::vector<std::byte> write_message(const Record& record, std::span<const std::byte> body = {}) {
  std::vector<std::byte> bytes(sizeof(Record) + body.size());
  std::memcpy(bytes.data(), &record, sizeof(Record));
  if (!body.empty()) std::memcpy(bytes.data() + sizeof(Record), body.data(), body.size());
  return bytes;
}

}  // namespace penstock::wire
