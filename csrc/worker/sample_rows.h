// SPDX-License-Identifier: Apache-2.0
#pragma once
// Copies a sample's tensors into the rows of their batch as soon as the sample is there, so that its memory serves the
// next sample while the batch is fetched: a worker then holds one sample beside the slab in the place of a whole
// batch of them. The rows lie one behind the other in one storage of the slab, which stack_samples() finds and gives
// out as the batch.
//
// A tensor is moved only where nobody else holds it or its memory, so that nobody can tell. Where a slab is not free at
// once, or the samples differ, tensors stay where they are and are stacked later.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "worker/slab_writer.h"

namespace penstock::worker {

// Smaller tensors cost more to move than their memory is worth.
constexpr uint64_t kMovedBytesMin = 16 << 10;

// Confined to the thread that serves requests.
class SampleRows {
 public:
  explicit SampleRows(SlabWriter& writer) : writer_(writer) {}

  // A batch of so many samples begins.
  void begin(size_t sample_count);

  // The next sample begins, the first one included.
  void begin_sample();

  // The row to put in the place of `tensor`, the next tensor of the sample, with its values; undefined where the tensor
  // is to stay. The caller alone refers to it.
  at::Tensor take(const at::Tensor& tensor);

  // The batch is made or given up: lets go of the slab. Whether a tensor could be moved since begin(), as far as it
  // depends on the samples.
  bool end();

 private:
  // A tensor that every sample has at the same place of its structure.
  struct Column {
    at::Tensor batch;  // [samples, ...] in the slab; undefined when all rows are moved, or none will be any more
    size_t moved_count = 0;
  };

  SlabWriter& writer_;
  size_t sample_count_ = 0;
  size_t begun_count_ = 0;  // of samples
  size_t next_column_ = 0;
  bool has_movable_ = false;
  std::vector<Column> columns_;
};

// The batch that these samples are if they are all of the rows of a storage in the slab, in order, and nobody but the
// caller holds it; else undefined.
at::Tensor batch_of_rows(SlabWriter& writer, std::span<const at::Tensor> samples);

}  // namespace penstock::worker
