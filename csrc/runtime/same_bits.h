// SPDX-License-Identifier: Apache-2.0
#pragma once
// Whether two results are one to the bit. Comparing values would not tell: NaN differs from itself, -0.0 equals 0.0,
// and kernels go other ways through memory that is laid out otherwise.

#include <ATen/core/Tensor.h>

#include <span>

namespace penstock::runtime {

// Whether two tensors are on the same device and have the same dtype, sizes, strides, pending conjugations and
// negations, and the same bytes in each element. Bytes between the elements do not count. Waits for a device.
bool is_same_bits(const at::Tensor& a, const at::Tensor& b);

// Whether both have as many tensors, each with the same bits as the other's.
bool is_same_bits(std::span<const at::Tensor> a, std::span<const at::Tensor> b);

}  // namespace penstock::runtime
