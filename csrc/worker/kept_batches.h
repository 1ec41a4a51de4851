// SPDX-License-Identifier: Apache-2.0
#pragma once
// Batches whose leaves stayed with this worker, for a trainer that reads such a leaf after all. The newest few are kept
// to answer a recall. An older batch is made again, by any worker that is asked.
//
// A kept batch holds the slab that contains its leaves, so the number is small: a trainer reads the batch that it was
// given last, and few have been sent to it since.

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "wire/batch_key.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

constexpr size_t kKeptBatchesMax = 4;

// Confined to the thread that makes batches.
class KeptBatches {
 public:
  struct Kept {
    uint64_t trainer_id = 0;
    wire::BatchKey key{};
    std::vector<at::Tensor> tensors;
    std::vector<std::string> boundary_keys;
    std::vector<std::byte> nest;
    uint8_t flags = 0;

    BatchContent content() const { return {.tensors = tensors, .boundary_keys = boundary_keys, .nest = nest}; }
  };

  // Keeps a batch, and drops the oldest if there are too many. `bytes_max` bounds the bytes of one batch.
  void keep(uint64_t trainer_id, wire::BatchKey key, const BatchContent& content, uint8_t flags, uint64_t bytes_max) {
    if (!batches_.empty() && batches_.front().trainer_id != trainer_id) batches_.clear();
    uint64_t bytes = 0;
    for (const at::Tensor& tensor : content.tensors) bytes += tensor.storage().nbytes();
    if (bytes > bytes_max) return;
    std::erase_if(batches_, [&](const Kept& kept) { return kept.key == key; });
    if (batches_.size() >= kKeptBatchesMax) batches_.pop_front();
    batches_.push_back({.trainer_id = trainer_id,
                        .key = key,
                        .tensors = content.tensors,
                        .boundary_keys = content.boundary_keys,
                        .nest = {content.nest.begin(), content.nest.end()},
                        .flags = flags});
  }

  // Null if the batch is not, or no longer, kept.
  const Kept* find(uint64_t trainer_id, wire::BatchKey key) const {
    const auto found = std::find_if(batches_.begin(), batches_.end(),
                                    [&](const Kept& kept) { return kept.trainer_id == trainer_id && kept.key == key; });
    return found == batches_.end() ? nullptr : &*found;
  }

 private:
  std::deque<Kept> batches_;  // oldest first
};

}  // namespace penstock::worker
