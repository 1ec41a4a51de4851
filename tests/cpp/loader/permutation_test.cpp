// SPDX-License-Identifier: Apache-2.0
#include "loader/permutation.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/randperm.h>
#include <gtest/gtest.h>

namespace penstock::loader {
namespace {

const auto kIntegers = at::TensorOptions().dtype(at::kLong);

class PermutationTest : public testing::TestWithParam<int64_t> {
 protected:
  at::Generator of_torch_ = at::detail::createCPUGenerator(77);
  at::Generator ours_ = at::detail::createCPUGenerator(77);
};

TEST_P(PermutationTest, IsTorchs) {
  at::Tensor indices = at::empty({3}, kIntegers);
  for (int draw = 0; draw < 2; ++draw) {
    const at::Tensor expected = at::randperm(GetParam(), of_torch_, kIntegers);
    draw_permutation(indices, GetParam(), ours_);
    EXPECT_TRUE(indices.equal(expected));
    EXPECT_TRUE(ours_.get_state().equal(of_torch_.get_state()));
  }
}

TEST_P(PermutationTest, OneThatIsSkippedLeavesTheGeneratorBehindIt) {
  at::randperm(GetParam(), of_torch_, kIntegers);
  skip_permutation(GetParam(), ours_);
  EXPECT_TRUE(ours_.get_state().equal(of_torch_.get_state()));
}

INSTANTIATE_TEST_SUITE_P(Sizes, PermutationTest,
                         testing::Values(0, 1, 2, 63, 64, 65, 1000, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 1'000'003));

}  // namespace
}  // namespace penstock::loader
