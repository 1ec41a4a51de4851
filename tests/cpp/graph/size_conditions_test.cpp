// SPDX-License-Identifier: Apache-2.0
#include "graph/size_conditions.h"

#include <gtest/gtest.h>

#include <limits>
#include <utility>
#include <vector>

namespace penstock::graph {
namespace {

using Op = SizeExpression::Op;

SizeExpression number(int64_t value) { return {.value = value}; }
SizeExpression symbol(int64_t place) { return {.op = Op::kSymbol, .value = place}; }
SizeExpression of(Op op, std::vector<SizeExpression> operands) {
  return {.op = op, .value = 0, .operands = std::move(operands)};
}

TEST(SizeExpression, DividesAndTakesRemaindersAsPythonDoes) {
  const auto computed = [](Op op, int64_t a, int64_t b) { return evaluate(of(op, {number(a), number(b)}), {}); };
  EXPECT_EQ(computed(Op::kFloorDiv, 7, 2), 3);
  EXPECT_EQ(computed(Op::kFloorDiv, -7, 2), -4);
  EXPECT_EQ(computed(Op::kFloorDiv, 7, -2), -4);
  EXPECT_EQ(computed(Op::kMod, -7, 2), 1);
  EXPECT_EQ(computed(Op::kMod, 7, -2), -1);
  EXPECT_EQ(computed(Op::kMod, 6, 3), 0);
}

TEST(SizeExpression, WhatHasNoValueInSixtyFourBitsHasNone) {
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min(), kMax = std::numeric_limits<int64_t>::max();
  EXPECT_FALSE(evaluate(of(Op::kFloorDiv, {number(1), number(0)}), {}));
  EXPECT_FALSE(evaluate(of(Op::kMod, {number(1), number(0)}), {}));
  EXPECT_FALSE(evaluate(of(Op::kFloorDiv, {number(kMin), number(-1)}), {}));
  EXPECT_FALSE(evaluate(of(Op::kAdd, {number(kMax), number(1)}), {}));
  EXPECT_FALSE(evaluate(of(Op::kMul, {number(kMax), number(2)}), {}));
  EXPECT_FALSE(evaluate(of(Op::kNot, {of(Op::kMod, {number(1), number(0)})}), {}));
}

TEST(SizeConditions, GivesTheStridesThatGoWithTheSizes) {
  // (s0, 3, s1), where s0 + 1 is even.
  const auto even = of(Op::kEq, {of(Op::kMod, {of(Op::kAdd, {symbol(0), number(1)}), number(2)}), number(0)});
  SizeConditions conditions({even}, {{of(Op::kMul, {number(3), symbol(1)}), symbol(1), number(1)}});
  ASSERT_NE(conditions.strides_for({5, 7}), nullptr);
  EXPECT_EQ(*conditions.strides_for({5, 7}), (SizeConditions::Strides{{21, 7, 1}}));
  EXPECT_EQ(conditions.strides_for({6, 7}), nullptr);
  EXPECT_EQ(conditions.strides_for({5, 1}), nullptr) << "a size of 1 broadcasts";
}

TEST(SizeConditions, AFurtherConditionIsAskedOnceForEachSizesAndOnlyWhereTheOthersHold) {
  SizeConditions conditions({of(Op::kLt, {symbol(0), number(10)})}, {});
  int asked = 0;
  const auto is_no = [&] {
    ++asked;
    return false;
  };
  EXPECT_EQ(conditions.strides_for({11}, is_no), nullptr);
  EXPECT_EQ(asked, 0);
  for (int round = 0; round < 3; ++round) EXPECT_EQ(conditions.strides_for({3}, is_no), nullptr);
  EXPECT_EQ(asked, 1);
}

TEST(SizeConditions, ForgetsWhenItRemembersTooMuch) {
  SizeConditions conditions({of(Op::kOr, {of(Op::kGe, {symbol(0), number(0)}), number(0)})}, {});
  for (int64_t size = 2; size < 3 * static_cast<int64_t>(SizeConditions::kRememberedMax); ++size)
    EXPECT_NE(conditions.strides_for({size}), nullptr);
}

}  // namespace
}  // namespace penstock::graph
