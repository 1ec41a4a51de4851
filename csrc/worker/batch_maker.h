// SPDX-License-Identifier: Apache-2.0
#pragma once
// The steps that every worker takes with a batch of the dataset: the prefixes are run on it, and it is sealed in a
// slab.

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

// From where a prefix that draws has its numbers, and what is sent of the batch.
struct BatchPlace {
  uint64_t epoch_seed = 0;
  uint64_t sequence = 0;
  const wire::Shipment* shipment = nullptr;  // the trainer's wish; null: the batch is sent whole
  double link_bytes_per_s = 0;               // to the trainer; 0: not known, or none
};

struct MadeBatch {
  SealedBatch sealed;
  bool is_compiled = false;  // compiled code made boundary tensors of it
  // The time spent on boundary tensors: computing them and writing the batch that they travel in.
  std::chrono::nanoseconds on_prefix{0};
};

// Confined to the thread that serves requests, but for writer()'s thread-safe calls.
class BatchMaker {
 public:
  // `is_closing` ends a wait for a slab.
  BatchMaker(const shm::SlabPoolOptions& options, const std::atomic<bool>& is_closing)
      : pool_(options, is_closing), writer_(pool_) {}

  shm::SlabPool& pool() { return pool_; }
  SlabWriter& writer() { return writer_; }
  PrefixStage& prefixes() { return prefixes_; }

  // Runs the prefixes and seals. On return `content` has the boundary tensors, too, and says which leaves were left
  // out and which tensors were written with fewer bytes. kClosed when nobody is there to take the batch.
  Result<MadeBatch> make(BatchContent& content, const BatchPlace& place);
  // Has make() hand leaves over that lie in shared memory already: for a trainer that descriptors can be passed to.
  void share_leaves() { shares_leaves_ = true; }
  // As SlabWriter::bound_sharing.
  void bound_sharing() { writer_.bound_sharing(); }
  // Seals an answer that is no batch of the dataset's.
  Result<MadeBatch> make_plain(const BatchContent& content);

 private:
  shm::SlabPool pool_;
  SlabWriter writer_;
  PrefixStage prefixes_;
  Narrowing narrowing_;
  bool shares_leaves_ = false;
};

}  // namespace penstock::worker
