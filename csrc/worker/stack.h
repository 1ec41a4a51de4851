// SPDX-License-Identifier: Apache-2.0
#pragma once
// The inner loops of default_collate and of TensorDataset, written straight into the slab. Each gives the very tensor
// that torch's code would, or nothing, and then torch's code runs.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "worker/slab_writer.h"

namespace penstock::worker {

// torch.stack(samples, 0). Undefined unless all are plain tensors of one dtype and shape.
at::Tensor stack_samples(SlabWriter& writer, std::span<const at::Tensor> samples);

// torch.tensor of Python floats, integers or booleans, which the caller has taken out of the list.
at::Tensor stack_numbers(SlabWriter& writer, std::span<const double> numbers);
at::Tensor stack_numbers(SlabWriter& writer, std::span<const int64_t> numbers);
at::Tensor stack_booleans(SlabWriter& writer, std::span<const uint8_t> booleans);

// torch.stack([source[i] for i in indices]). Undefined unless `source` is plain and every index is in range.
at::Tensor gather_rows(SlabWriter& writer, const at::Tensor& source, std::span<const int64_t> indices);

}  // namespace penstock::worker
