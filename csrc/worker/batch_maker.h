// SPDX-License-Identifier: Apache-2.0
#pragma once
// The steps common to all workers for a batch of the dataset (BatchMaker): run the prefixes on it and seal it in a
// slab. These include choosing which leaves stay with the worker (leaves_to_withhold), which are handed over in the
// memory that contains them (leaves_to_share), and which tensors are written with fewer bytes (Narrowing).

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "base/result.h"
#include "shm/slab_pool.h"
#include "wire/blob_record.h"
#include "worker/prefix_stage.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

// Whether it pays off to write a tensor of `plain_bytes` in `narrow_bytes`, for a link of `link_bytes_per_s` (0:
// unknown).
bool is_narrow_worthwhile(uint64_t plain_bytes, uint64_t narrow_bytes, double link_bytes_per_s);

// Decides which tensors of a batch are written with fewer bytes (wire/narrow.h), by price: the time saved on the link
// against the additional time to write and read them. A tensor that did not fit a few times in a row is then examined
// only occasionally. Confined to the thread that makes batches.
class Narrowing {
 public:
  // Chooses the forms of the tensors of `content`, except withheld ones. Empty if none is worthwhile.
  std::vector<std::optional<wire::NarrowForm>> forms_of(const BatchContent& content, double link_bytes_per_s);

 private:
  struct Memory {
    uint32_t misses = 0;   // consecutive
    uint32_t skipped = 0;  // since the last examination
  };

  std::map<size_t, Memory> by_tensor_;
};

// The indices of the leaves of a batch that stay with this worker, by the trainer's lazy-fetch list
// (wire/blob_record.h), in ascending order. Empty for a batch that lacks boundary tensors, will be compared, or is a
// single pickle. A leaf stays only if the trainer can provide a substitute: a NumPy array cannot wait for its values,
// and a tensor that shares memory with another has to be sent with it.
//
// `number` is the batch's number in its epoch.
std::vector<uint32_t> leaves_to_withhold(const wire::Shipment& shipment, const BatchContent& content, uint64_t number);

// Passing a descriptor adds about 15 us to a batch, and copying this many bytes takes 2 us: a row of a shared table is
// copied. Up to 1 MiB a copy is still slightly faster (bench/shared_tensors.py), but torch's aliasing rules matter more
// than that.
constexpr uint64_t kSharedBytesMin = uint64_t{64} << 10;

// The leaves of a batch that are handed over in the shared memory that already contains them, instead of being copied.
// As with torch's DataLoader, the trainer's tensor then shares memory with the dataset's, and each sees the other's
// writes.
//
// These are the leaves of at least kSharedBytesMin each that are in torch's shared memory, and the other leaves on the
// same storages. This covers memory that torch passes by descriptor: share_memory_(), or memory received through one of
// its queues. At most wire::kSharedFileCountMax storages, the first ones; leaves in others are copied.
SharedLeaves leaves_to_share(const BatchContent& content);

// The seed key of a prefix's random draws, and the parts of the batch to send.
struct BatchPlace {
  uint64_t epoch_seed = 0;
  uint64_t sequence = 0;
  const wire::Shipment* shipment = nullptr;  // the trainer's lazy-fetch list; null: the whole batch is sent
  double link_bytes_per_s = 0;               // to the trainer; 0: unknown, or no link
};

struct MadeBatch {
  SealedBatch sealed;
  bool is_compiled = false;  // compiled code produced some of its boundary tensors
  // The time spent on boundary tensors: computing them and writing the batch that contains them.
  std::chrono::nanoseconds on_prefix{0};
};

// Confined to the thread that serves requests, except for writer()'s thread-safe calls.
class BatchMaker {
 public:
  // `is_closing` ends a wait for a slab.
  BatchMaker(const shm::SlabPoolOptions& options, const std::atomic<bool>& is_closing)
      : pool_(options, is_closing), writer_(pool_) {}

  shm::SlabPool& pool() { return pool_; }
  SlabWriter& writer() { return writer_; }
  PrefixStage& prefixes() { return prefixes_; }

  // Runs the prefixes and seals the batch. On return `content` also has the boundary tensors, and records which leaves
  // were left out and which tensors were written with fewer bytes. kClosed when there is no trainer to take the batch.
  Result<MadeBatch> make(BatchContent& content, const BatchPlace& place);
  // Makes make() hand over leaves that are already in shared memory, for a trainer that can receive descriptors.
  void share_leaves() { shares_leaves_ = true; }
  // As SlabWriter::bound_sharing.
  void bound_sharing() { writer_.bound_sharing(); }
  // Seals an answer that is not a batch of the dataset.
  Result<MadeBatch> make_plain(const BatchContent& content);

 private:
  shm::SlabPool pool_;
  SlabWriter writer_;
  PrefixStage prefixes_;
  Narrowing narrowing_;
  bool shares_leaves_ = false;
};

}  // namespace penstock::worker
