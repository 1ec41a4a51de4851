// SPDX-License-Identifier: Apache-2.0
#pragma once
// The copy of one row into a batch: past the caches where the batch is too large to be found in them by its reader.

#include <ATen/core/Tensor.h>

#include <cstddef>

namespace penstock::dataset {

using CopyBytes = void (*)(void* target, const void* source, size_t bytes);

// How rows of `row_bytes` are copied into a batch of `count` of them.
CopyBytes copy_of_rows(size_t count, size_t row_bytes);

// batch[place] = row, for a contiguous batch, and a row of its type and its rows' shape.
void copy_row(const at::Tensor& batch, size_t place, const at::Tensor& row);

}  // namespace penstock::dataset
