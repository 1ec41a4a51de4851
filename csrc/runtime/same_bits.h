// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decides whether two results are bit-for-bit identical. Comparing values is not enough: NaN differs from itself, -0.0
// equals 0.0, and kernels traverse memory with another layout differently.

#include <ATen/core/Tensor.h>

#include <span>

namespace penstock::runtime {

// Whether two tensors are on the same device and have the same dtype, sizes, strides, pending conjugations and
// negations, and the same bytes in each element. Bytes between the elements do not count. Waits for a device.
bool is_same_bits(const at::Tensor& a, const at::Tensor& b);

// Whether both have the same number of tensors, and each pair has the same bits.
bool is_same_bits(std::span<const at::Tensor> a, std::span<const at::Tensor> b);

}  // namespace penstock::runtime
