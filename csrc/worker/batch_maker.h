// SPDX-License-Identifier: Apache-2.0
#pragma once
// The steps common to all workers for a batch of the dataset: run the prefixes on it and seal it in a slab.

#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/result.h"
#include "shm/slab_pool.h"
#include "wire/shipment.h"
#include "worker/narrowing.h"
#include "worker/prefix_stage.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

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
