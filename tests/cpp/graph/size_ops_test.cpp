// SPDX-License-Identifier: Apache-2.0
// Arithmetic on sizes has Python's meaning.
#include "graph/size_ops.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

namespace penstock::graph {
namespace {

Result<Number> compute(std::string_view name, std::vector<Number> operands) {
  const SizeOp* op = find_size_op(name);
  EXPECT_NE(op, nullptr) << name;
  return evaluate_size_op(*op, operands);
}

void expect_number(std::string_view name, std::vector<Number> operands, Number expected) {
  const auto result = compute(name, std::move(operands));
  ASSERT_TRUE(result) << name << ": " << result.error().message;
  EXPECT_EQ(result.value(), expected) << name;
}

constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

Number i(int64_t value) { return value; }
Number f(double value) { return value; }
Number b(bool value) { return value; }

TEST(SizeOps, DivisionRoundsDownAsInPython) {
  // python3 -c "print(7//2, -7//2, 7//-2, -7//-2, 7%2, -7%2, 7%-2, -7%-2)"
  expect_number("size::floordiv", {i(7), i(2)}, i(3));
  expect_number("size::floordiv", {i(-7), i(2)}, i(-4));
  expect_number("size::floordiv", {i(7), i(-2)}, i(-4));
  expect_number("size::floordiv", {i(-7), i(-2)}, i(3));
  expect_number("size::mod", {i(7), i(2)}, i(1));
  expect_number("size::mod", {i(-7), i(2)}, i(1));
  expect_number("size::mod", {i(7), i(-2)}, i(-1));
  expect_number("size::mod", {i(-7), i(-2)}, i(-1));
  expect_number("size::floordiv", {f(-7.5), f(2)}, f(-4));
  expect_number("size::mod", {f(-7.5), f(2)}, f(0.5));
  expect_number("size::truediv", {i(7), i(2)}, f(3.5));
}

TEST(SizeOps, MixedOperandsAreFloatsAndTruthsAreIntegers) {
  expect_number("size::add", {i(1), f(0.5)}, f(1.5));
  expect_number("size::add", {b(true), i(2)}, i(3));
  expect_number("size::eq", {b(true), i(1)}, b(true));
  expect_number("size::max", {i(2), f(2.0)}, i(2));  // the first of equals
  expect_number("size::min", {i(3), i(2)}, i(2));
}

TEST(SizeOps, ConversionsTruncateAndRound) {
  expect_number("size::int", {f(-2.7)}, i(-2));
  expect_number("size::floor", {f(-2.7)}, i(-3));
  expect_number("size::ceil", {f(-2.7)}, i(-2));
  expect_number("size::float", {i(3)}, f(3));
  expect_number("size::not", {i(0)}, b(true));
  expect_number("size::bool", {f(0.1)}, b(true));
  expect_number("size::neg", {i(5)}, i(-5));
  expect_number("size::abs", {i(-5)}, i(5));
  expect_number("size::pow", {i(3), i(4)}, i(81));
  expect_number("size::sqrt", {i(9)}, f(3));
}

TEST(SizeOps, WhatDoesNotFitIsAnError) {
  EXPECT_FALSE(compute("size::add", {i(kMax), i(1)}));
  EXPECT_FALSE(compute("size::sub", {i(kMin), i(1)}));
  EXPECT_FALSE(compute("size::mul", {i(kMax), i(2)}));
  EXPECT_FALSE(compute("size::pow", {i(10), i(40)}));
  EXPECT_FALSE(compute("size::pow", {i(2), i(-1)}));
  EXPECT_FALSE(compute("size::floordiv", {i(kMin), i(-1)}));
  EXPECT_FALSE(compute("size::neg", {i(kMin)}));
  EXPECT_FALSE(compute("size::abs", {i(kMin)}));
  EXPECT_FALSE(compute("size::int", {f(1e30)}));
  EXPECT_FALSE(compute("size::int", {f(std::nan(""))}));
  expect_number("size::mod", {i(kMin), i(-1)}, i(0));
}

TEST(SizeOps, ZeroDivisorsAndWrongCountsAreErrors) {
  for (const char* name : {"size::floordiv", "size::mod", "size::truediv"}) {
    EXPECT_FALSE(compute(name, {i(1), i(0)})) << name;
    EXPECT_FALSE(compute(name, {f(1), f(0)})) << name;
  }
  EXPECT_FALSE(compute("size::add", {i(1)}));
  EXPECT_FALSE(compute("size::sqrt", {i(-1)}));
}

TEST(SizeOps, EveryArithmeticOperatorOfTheTableComputes) {
  for (const SizeOp& op : size_ops()) {
    if (op.kind != SizeOpKind::kArithmetic) continue;
    for (const Number& operand : {i(2), f(2.5), b(true)})
      EXPECT_TRUE(evaluate_size_op(op, std::vector<Number>(op.arity, operand))) << op.name;
  }
}

TEST(SizeOps, ListPositionsCountFromEitherEnd) {
  EXPECT_EQ(list_position(0, 3), 0u);
  EXPECT_EQ(list_position(-1, 3), 2u);
  EXPECT_EQ(list_position(3, 3), std::nullopt);
  EXPECT_EQ(list_position(-4, 3), std::nullopt);
  EXPECT_EQ(list_position(0, 0), std::nullopt);
}

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
