// SPDX-License-Identifier: Apache-2.0
#include "runtime/same_bits.h"

#include <algorithm>
#include <cstring>

#include "base/assert.h"

namespace penstock::runtime {

bool is_same_bits(const at::Tensor& a, const at::Tensor& b) {
  PENSTOCK_ASSERT(!a.is_meta() && !b.is_meta(), "meta tensors have no bits to compare");
  if (a.device() != b.device()) return false;
  if (!a.is_cpu()) {
    // A copy keeps the strides of a dense tensor; others would get a new layout.
    return a.sizes() == b.sizes() && a.strides() == b.strides() && is_same_bits(a.cpu(), b.cpu());
  }
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes() || a.strides() != b.strides()) return false;
  if (a.is_conj() != b.is_conj() || a.is_neg() != b.is_neg()) return false;
  const at::Tensor first = a.contiguous();
  const at::Tensor second = b.contiguous();
  return first.nbytes() == 0 || std::memcmp(first.const_data_ptr(), second.const_data_ptr(), first.nbytes()) == 0;
}

bool is_same_bits(std::span<const at::Tensor> a, std::span<const at::Tensor> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& first, const at::Tensor& second) { return is_same_bits(first, second); });
}

}  // namespace penstock::runtime
