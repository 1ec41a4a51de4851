// SPDX-License-Identifier: Apache-2.0
#include "graph/size_conditions.h"

#include <algorithm>
#include <limits>

#include "base/assert.h"

namespace penstock::graph {
namespace {

using Op = SizeExpression::Op;
using Computed = std::optional<int64_t>;

Computed floor_division(int64_t a, int64_t b) {
  if (b == 0 || (a == std::numeric_limits<int64_t>::min() && b == -1)) return std::nullopt;
  const bool is_rounded_up = a % b != 0 && (a < 0) != (b < 0);
  return a / b - (is_rounded_up ? 1 : 0);
}

Computed remainder(int64_t a, int64_t b) {
  const Computed quotient = floor_division(a, b);
  return quotient ? Computed(a - *quotient * b) : std::nullopt;
}

Computed combined(Op op, int64_t a, int64_t b) {
  int64_t result = 0;
  switch (op) {
    case Op::kAdd: return __builtin_add_overflow(a, b, &result) ? std::nullopt : Computed(result);
    case Op::kMul: return __builtin_mul_overflow(a, b, &result) ? std::nullopt : Computed(result);
    case Op::kFloorDiv: return floor_division(a, b);
    case Op::kMod: return remainder(a, b);
    case Op::kMax: return std::max(a, b);
    case Op::kMin: return std::min(a, b);
    case Op::kEq: return a == b;
    case Op::kNe: return a != b;
    case Op::kLt: return a < b;
    case Op::kLe: return a <= b;
    case Op::kGt: return a > b;
    case Op::kGe: return a >= b;
    case Op::kAnd: return a != 0 && b != 0;
    case Op::kOr: return a != 0 || b != 0;
    case Op::kNot:
    case Op::kInteger:
    case Op::kSymbol: break;
  }
  PENSTOCK_ASSERT(false, "the operator must have two operands");
}

}  // namespace

std::optional<int64_t> evaluate(const SizeExpression& expression, std::span<const int64_t> sizes) {
  if (expression.op == Op::kInteger) return expression.value;
  if (expression.op == Op::kSymbol) {
    PENSTOCK_ASSERT(expression.value >= 0 && static_cast<size_t>(expression.value) < sizes.size());
    return sizes[static_cast<size_t>(expression.value)];
  }
  PENSTOCK_ASSERT(!expression.operands.empty());
  std::optional<int64_t> result = evaluate(expression.operands.front(), sizes);
  if (expression.op == Op::kNot) return result ? Computed(*result == 0) : std::nullopt;
  for (size_t place = 1; place < expression.operands.size() && result; ++place) {
    const std::optional<int64_t> next = evaluate(expression.operands[place], sizes);
    result = next ? combined(expression.op, *result, *next) : std::nullopt;
  }
  return result;
}

std::optional<SizeConditions::Strides> SizeConditions::look(const std::vector<int64_t>& sizes) const {
  constexpr int64_t kSymbolMin = 2;
  if (std::any_of(sizes.begin(), sizes.end(), [](int64_t size) { return size < kSymbolMin; })) return std::nullopt;
  for (const SizeExpression& guard : guards_)
    if (evaluate(guard, sizes).value_or(0) == 0) return std::nullopt;
  Strides strides;
  for (const std::vector<SizeExpression>& of_one : strides_) {
    strides.emplace_back();
    for (const SizeExpression& stride : of_one) {
      const std::optional<int64_t> number = evaluate(stride, sizes);
      if (!number) return std::nullopt;
      strides.back().push_back(*number);
    }
  }
  return strides;
}

}  // namespace penstock::graph
