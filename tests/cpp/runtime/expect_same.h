// SPDX-License-Identifier: Apache-2.0
#pragma once
// Two tensors have the same type, sizes and bits. A NaN is itself, and the zeros of both signs differ.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

namespace penstock::runtime {

// `context` is told with a difference.
inline void expect_same(const at::Tensor& seen, const at::Tensor& expected, const std::string& context = "") {
  ASSERT_EQ(seen.scalar_type(), expected.scalar_type()) << context;
  ASSERT_EQ(seen.sizes(), expected.sizes()) << context;
  EXPECT_TRUE(at::equal(seen.contiguous().view(-1).view(at::kByte), expected.contiguous().view(-1).view(at::kByte)))
      << context;
}

}  // namespace penstock::runtime
