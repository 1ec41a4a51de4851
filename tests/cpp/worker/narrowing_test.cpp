// SPDX-License-Identifier: Apache-2.0
#include "worker/narrowing.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace penstock::worker {
namespace {

constexpr double kGigabit = 125e6;  // bytes a second

TEST(NarrowingTest, IsWorthwhileWhereTheLinkIsSlowerThanTheWriting) {
  EXPECT_TRUE(is_narrow_worthwhile(8000, 1000, kGigabit));
  EXPECT_TRUE(is_narrow_worthwhile(8000, 5000, kGigabit));
  EXPECT_FALSE(is_narrow_worthwhile(8000, 7000, kGigabit));
  EXPECT_FALSE(is_narrow_worthwhile(8000, 1000, 10 * kGigabit));
  EXPECT_FALSE(is_narrow_worthwhile(8000, 1000, 0));  // not known
  EXPECT_FALSE(is_narrow_worthwhile(8000, 8000, 1));
}

TEST(NarrowingTest, TensorsThatFitAreNarrowed) {
  Narrowing narrowing;
  BatchContent content{.tensors = {at::arange(1000), at::rand({1000}), at::arange(1000), at::arange(10)},
                       .boundary_keys = {},
                       .nest = {}};
  content.withheld = {2};
  const auto forms = narrowing.forms_of(content, kGigabit);
  ASSERT_EQ(forms.size(), 4u);
  EXPECT_EQ(forms[0]->encoding, wire::Encoding::kOffset16);
  EXPECT_FALSE(forms[1]);
  EXPECT_FALSE(forms[2]);
  EXPECT_FALSE(forms[3]);
  EXPECT_TRUE(narrowing.forms_of(content, 100 * kGigabit).empty());
}

TEST(NarrowingTest, TensorThatDidNotFitIsLookedAtNowAndThen) {
  Narrowing narrowing;
  const BatchContent misfit{.tensors = {at::rand({1000})}, .boundary_keys = {}, .nest = {}};
  const BatchContent fit{.tensors = {at::arange(1000)}, .boundary_keys = {}, .nest = {}};
  for (int count = 0; count < 4; ++count) EXPECT_TRUE(narrowing.forms_of(misfit, kGigabit).empty());
  int batches = 1;
  while (narrowing.forms_of(fit, kGigabit).empty()) ++batches;
  EXPECT_EQ(batches, 64);
  EXPECT_FALSE(narrowing.forms_of(fit, kGigabit).empty());  // from here on always
}

}  // namespace
}  // namespace penstock::worker
