// SPDX-License-Identifier: Apache-2.0
#pragma once
// One batch of a TensorDataset: the rows of each tensor, in the list that default_collate makes from tuples. No Python.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "wire/nest.h"
#include "worker/slab_writer.h"

namespace penstock::worker {

struct RowBatch {
  std::vector<at::Tensor> tensors;
  wire::NestWriter nest;

  BatchContent content() const { return {.tensors = tensors, .boundary_keys = {}, .nest = nest.view()}; }
};

// Empty if the indices are not plain rows; torch's code then reports the error.
std::optional<RowBatch> gather_batch(SlabWriter& writer, std::span<const at::Tensor> sources,
                                     std::span<const int64_t> indices);

}  // namespace penstock::worker
