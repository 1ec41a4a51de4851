// SPDX-License-Identifier: Apache-2.0
#pragma once
// The inner loops of default_collate and of TensorDataset, written straight into the slab. Each returns exactly the
// tensor that torch's code would, or none, and then torch's code runs.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

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

}  // namespace penstock::worker
