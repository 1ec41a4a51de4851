// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whether two results are one to the bit. Comparing values would not tell: NaN differs from itself, -0.0 equals 0.0,
// and kernels go other ways through memory that is laid out otherwise.

#include <ATen/core/Tensor.h>

#include <span>

namespace penstock::runtime {

// Of tensors on the CPU: the same dtype, sizes, strides and pending conjugations and negations, and element by element
// the same bytes. Bytes between the elements do not count.
bool is_same_bits(const at::Tensor& a, const at::Tensor& b);

// As many tensors, and each the same as the other's.
bool is_same_bits(std::span<const at::Tensor> a, std::span<const at::Tensor> b);

}  // namespace penstock::runtime
