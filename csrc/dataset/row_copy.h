// SPDX-License-Identifier: Apache-2.0
#pragma once
// Copies one row into a batch, bypassing the caches if the batch is too large to still be cached when it is read.

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace penstock::dataset {

using CopyBytes = void (*)(void* target, const void* source, size_t bytes);

// Returns how to copy rows of `row_bytes` into a batch of `count` of them.
CopyBytes copy_of_rows(size_t count, size_t row_bytes);

// Sets batch[place] = row, for a contiguous batch, and a row of its dtype and its rows' shape.
void copy_row(const at::Tensor& batch, size_t place, const at::Tensor& row);

}  // namespace penstock::dataset
