// SPDX-License-Identifier: Apache-2.0
#pragma once
// Copies a sample's tensors into the rows of their batch as soon as the sample is fetched, so that its memory is reused
// for the next sample of the batch: a worker then holds one sample in addition to the slab, instead of a whole batch of
// them. The rows are adjacent in one storage of the slab, which stack_samples() recognises and returns as the batch.
//
// A tensor is moved only if neither it nor its memory has other references, so the move is not observable. If no slab
// is immediately free, or the samples differ, tensors stay in place and are stacked later.

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

  // Starts a batch of `sample_count` samples.
  void begin(size_t sample_count);

  // Starts the next sample, including the first.
  void begin_sample();

  // Returns the row that replaces `tensor`, the next tensor of the sample, with its values; undefined if the tensor has
  // to stay. The caller must hold the only reference to it.
  at::Tensor take(const at::Tensor& tensor);

  // The batch is made or given up: releases the slab. Returns whether a tensor could be moved since begin(), as far as
  // this depends on the samples.
  bool end();

 private:
  // A tensor that every sample has at the same place of its structure.
  struct Column {
    at::Tensor batch;  // [samples, ...] in the slab; undefined when all rows are moved, or no more will be
    size_t moved_count = 0;
  };

  SlabWriter& writer_;
  size_t sample_count_ = 0;
  size_t begun_count_ = 0;  // number of samples started
  size_t next_column_ = 0;
  bool has_movable_ = false;
  std::vector<Column> columns_;
};

// The batch of these samples if they are all the rows of a storage in the slab, in order, and the caller holds the only
// references; else undefined.
at::Tensor batch_of_rows(SlabWriter& writer, std::span<const at::Tensor> samples);

}  // namespace penstock::worker
