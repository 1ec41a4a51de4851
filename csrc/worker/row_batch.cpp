// SPDX-License-Identifier: Apache-2.0
#include "worker/row_batch.h"

#include "worker/stack.h"

namespace penstock::worker {

std::optional<RowBatch> gather_batch(SlabWriter& writer, std::span<const at::Tensor> sources,
                                     std::span<const int64_t> indices) {
  RowBatch batch;
  batch.nest.list(static_cast<uint32_t>(sources.size()));
  writer.begin();
  for (const at::Tensor& source : sources) {
    batch.nest.tensor(static_cast<uint32_t>(batch.tensors.size()));
    batch.tensors.push_back(gather_rows(writer, source, indices));
    if (!batch.tensors.back().defined()) return std::nullopt;
  }
  return batch;
}

}  // namespace penstock::worker
