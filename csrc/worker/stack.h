// SPDX-License-Identifier: Apache-2.0
#pragma once
// The inner loops of default_collate and of TensorDataset, written straight into the slab. Each returns exactly the
// tensor that torch's code would, or none, and then torch's code runs. SampleRows moves a sample's tensors into their
// rows before the next sample is fetched.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "wire/nest.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

// torch.stack(samples, 0). Undefined unless all are plain tensors of one dtype and shape.
at::Tensor stack_samples(SlabWriter& writer, std::span<const at::Tensor> samples);

// A number to be put into a column: `floating` if the column has a floating-point dtype, else `integer`.
union Number {
  double floating;
  int64_t integer;
};

// A column of numbers that the caller extracted from the samples. The dtype is float64, float32, bool, uint8 or a
// signed integer type, and each number fits it.
at::Tensor stack_numbers(SlabWriter& writer, std::span<const Number> numbers, at::ScalarType dtype);

// torch.stack of `rows`, each the address of a contiguous tensor of `sizes`.
at::Tensor stack_rows(SlabWriter& writer, std::span<const void* const> rows, at::IntArrayRef sizes,
                      at::ScalarType dtype);

// torch.stack([source[i] for i in indices]). Undefined unless `source` is plain and every index is in range.
at::Tensor gather_rows(SlabWriter& writer, const at::Tensor& source, std::span<const int64_t> indices);

// One batch of a TensorDataset: the rows of each tensor, in the list that default_collate makes from tuples. No Python.
struct RowBatch {
  std::vector<at::Tensor> tensors;
  wire::NestWriter nest;

  BatchContent content() const { return {.tensors = tensors, .boundary_keys = {}, .nest = nest.view()}; }
};

// Empty if the indices are not plain rows; torch's code then reports the error.
std::optional<RowBatch> gather_batch(SlabWriter& writer, std::span<const at::Tensor> sources,
                                     std::span<const int64_t> indices);

// Smaller tensors cost more to move than their memory is worth.
constexpr uint64_t kMovedBytesMin = 16 << 10;

// Copies a sample's tensors into the rows of their batch as soon as the sample is fetched, so that its memory is reused
// for the next sample of the batch: a worker then holds one sample in addition to the slab, instead of a whole batch of
// them. The rows are adjacent in one storage of the slab, which stack_samples() recognises and returns as the batch.
//
// A tensor is moved only if neither it nor its memory has other references, so the move is not observable. If no slab
// is immediately free, or the samples differ, tensors stay in place and are stacked later.
//
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
