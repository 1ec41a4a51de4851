// SPDX-License-Identifier: Apache-2.0
#include "graph/size_ops.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "base/result.h"

namespace penstock::graph {
namespace {

constexpr auto kArithmetic = SizeOpKind::kArithmetic;
constexpr auto kMetadata = SizeOpKind::kMetadata;
constexpr auto kList = SizeOpKind::kList;
constexpr auto kNumber = ValueKind::kNumber;

constexpr std::array kSizeOps = {
    SizeOp{"size::add", 2, kArithmetic, kNumber},
    SizeOp{"size::sub", 2, kArithmetic, kNumber},
    SizeOp{"size::mul", 2, kArithmetic, kNumber},
    SizeOp{"size::floordiv", 2, kArithmetic, kNumber},
    SizeOp{"size::truediv", 2, kArithmetic, kNumber},
    SizeOp{"size::mod", 2, kArithmetic, kNumber},
    SizeOp{"size::pow", 2, kArithmetic, kNumber},
    SizeOp{"size::min", 2, kArithmetic, kNumber},
    SizeOp{"size::max", 2, kArithmetic, kNumber},
    SizeOp{"size::eq", 2, kArithmetic, kNumber},
    SizeOp{"size::ne", 2, kArithmetic, kNumber},
    SizeOp{"size::lt", 2, kArithmetic, kNumber},
    SizeOp{"size::le", 2, kArithmetic, kNumber},
    SizeOp{"size::gt", 2, kArithmetic, kNumber},
    SizeOp{"size::ge", 2, kArithmetic, kNumber},
    SizeOp{"size::neg", 1, kArithmetic, kNumber},
    SizeOp{"size::abs", 1, kArithmetic, kNumber},
    SizeOp{"size::not", 1, kArithmetic, kNumber},
    SizeOp{"size::int", 1, kArithmetic, kNumber},
    SizeOp{"size::float", 1, kArithmetic, kNumber},
    SizeOp{"size::bool", 1, kArithmetic, kNumber},
    SizeOp{"size::floor", 1, kArithmetic, kNumber},
    SizeOp{"size::ceil", 1, kArithmetic, kNumber},
    SizeOp{"size::sqrt", 1, kArithmetic, kNumber},
    SizeOp{"size::sizes", 1, kMetadata, ValueKind::kNumberList},
    SizeOp{"size::rank", 1, kMetadata, kNumber},
    SizeOp{"size::numel", 1, kMetadata, kNumber},
    SizeOp{"size::dtype", 1, kMetadata, kNumber},
    SizeOp{"list::get", 2, kList, ValueKind::kUnknown},
    SizeOp{"list::length", 1, kList, kNumber},
};

Fault failure(const SizeOp& op, std::string_view what) {
  return {Errc::kFailed, std::string(op.name) + " failed: " + std::string(what)};
}

double as_double(const Number& number) {
  return std::visit([](auto value) { return static_cast<double>(value); }, number);
}

// Returns an integer as in Python: True is 1.
std::optional<int64_t> as_integer(const Number& number) {
  if (const auto* integer = std::get_if<int64_t>(&number)) return *integer;
  if (const auto* truth = std::get_if<bool>(&number)) return *truth ? 1 : 0;
  return std::nullopt;
}

// Converts a float to an integer, as int(), math.floor() and math.ceil() do.
Result<Number> to_integer(const SizeOp& op, double value) {
  // 2^63 is the first double that does not fit; a nan fails both comparisons.
  if (!(value >= -9223372036854775808.0 && value < 9223372036854775808.0))
    return failure(op, "the float does not fit in 64 bits");
  return Number(static_cast<int64_t>(value));
}

double python_mod(double a, double b) {
  const double rest = std::fmod(a, b);
  if (rest == 0) return std::copysign(0.0, b);
  return (rest < 0) != (b < 0) ? rest + b : rest;
}

// Like CPython's float_floor_div: computed from the remainder, so that it agrees with the modulus.
double python_floordiv(double a, double b) {
  const double rest = std::fmod(a, b);
  double quotient = (a - rest) / b;
  if (rest != 0 && (rest < 0) != (b < 0)) quotient -= 1;
  if (quotient == 0) return std::copysign(0.0, a / b);
  const double floored = std::floor(quotient);
  return quotient - floored > 0.5 ? floored + 1 : floored;
}

Result<Number> integer_power(const SizeOp& op, int64_t base, int64_t exponent) {
  if (exponent < 0) return failure(op, "the exponent is negative");
  int64_t power = 1;
  for (; exponent > 0; exponent >>= 1) {
    if ((exponent & 1) != 0 && __builtin_mul_overflow(power, base, &power)) return failure(op, "the result overflows");
    if (exponent > 1 && __builtin_mul_overflow(base, base, &base)) return failure(op, "the result overflows");
  }
  return Number(power);
}

Result<Number> integer_binary(const SizeOp& op, std::string_view verb, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflow = false;
  if (verb == "add") {
    overflow = __builtin_add_overflow(a, b, &result);
  } else if (verb == "sub") {
    overflow = __builtin_sub_overflow(a, b, &result);
  } else if (verb == "mul") {
    overflow = __builtin_mul_overflow(a, b, &result);
  } else if (verb == "pow") {
    return integer_power(op, a, b);
  } else {
    if (b == 0) return failure(op, "the divisor is zero");
    if (verb == "truediv") return Number(static_cast<double>(a) / static_cast<double>(b));
    if (b == -1) {  // INT64_MIN / -1 traps
      if (verb == "mod") return Number(int64_t{0});
      overflow = __builtin_sub_overflow(int64_t{0}, a, &result);
    } else {
      const int64_t rest = a % b;
      const bool is_floor_below = rest != 0 && (rest < 0) != (b < 0);
      if (verb == "mod") return Number(is_floor_below ? rest + b : rest);
      result = a / b - (is_floor_below ? 1 : 0);
    }
  }
  if (overflow) return failure(op, "the result overflows");
  return Number(result);
}

Result<Number> real_binary(const SizeOp& op, std::string_view verb, double a, double b) {
  if (verb == "add") return Number(a + b);
  if (verb == "sub") return Number(a - b);
  if (verb == "mul") return Number(a * b);
  if (verb == "pow") return Number(std::pow(a, b));
  if (b == 0) return failure(op, "the divisor is zero");
  if (verb == "truediv") return Number(a / b);
  if (verb == "mod") return Number(python_mod(a, b));
  return Number(python_floordiv(a, b));
}

template <typename T>
bool compare(std::string_view verb, T a, T b) {
  if (verb == "eq") return a == b;
  if (verb == "ne") return a != b;
  if (verb == "lt") return a < b;
  if (verb == "le") return a <= b;
  if (verb == "gt") return a > b;
  return a >= b;
}

bool is_comparison(std::string_view verb) { return verb.size() == 2; }  // only eq ne lt le gt ge

Result<Number> evaluate_binary(const SizeOp& op, std::string_view verb, const Number& a, const Number& b) {
  const auto integer_a = as_integer(a);
  const auto integer_b = as_integer(b);
  const bool are_integers = integer_a && integer_b;
  if (is_comparison(verb))
    return Number(are_integers ? compare(verb, *integer_a, *integer_b) : compare(verb, as_double(a), as_double(b)));
  // Like Python's min and max: the first operand unless the second is strictly beyond it.
  if (verb == "min" || verb == "max") {
    const std::string_view beyond = verb == "min" ? "lt" : "gt";
    const bool takes_b =
        are_integers ? compare(beyond, *integer_b, *integer_a) : compare(beyond, as_double(b), as_double(a));
    return takes_b ? b : a;
  }
  if (are_integers) return integer_binary(op, verb, *integer_a, *integer_b);
  return real_binary(op, verb, as_double(a), as_double(b));
}

Result<Number> evaluate_unary(const SizeOp& op, std::string_view verb, const Number& a) {
  const auto integer = as_integer(a);
  if (verb == "not") return Number(as_double(a) == 0);
  if (verb == "bool") return Number(as_double(a) != 0);
  if (verb == "float") return Number(as_double(a));
  if (verb == "sqrt") {
    if (as_double(a) < 0) return failure(op, "the operand is negative");
    return Number(std::sqrt(as_double(a)));
  }
  if (verb == "int" || verb == "floor" || verb == "ceil") {
    if (integer) return Number(*integer);
    const double real = as_double(a);
    return to_integer(op, verb == "int" ? real : verb == "floor" ? std::floor(real) : std::ceil(real));
  }
  PENSTOCK_ASSERT(verb == "neg" || verb == "abs", "no evaluation for ", op.name);
  if (!integer) return Number(verb == "neg" ? -as_double(a) : std::fabs(as_double(a)));
  if (verb == "abs" && *integer >= 0) return Number(*integer);
  return integer_binary(op, "sub", 0, *integer);
}

}  // namespace

std::span<const SizeOp> size_ops() { return kSizeOps; }

const SizeOp* find_size_op(std::string_view name) {
  for (const SizeOp& op : kSizeOps)
    if (op.name == name) return &op;
  return nullptr;
}

Result<Number> evaluate_size_op(const SizeOp& op, std::span<const Number> operands) {
  PENSTOCK_ASSERT(op.kind == SizeOpKind::kArithmetic, op.name, " is not arithmetic");
  if (operands.size() != op.arity)
    return failure(op,
                   std::to_string(operands.size()) + " operands where " + std::to_string(op.arity) + " were expected");
  const std::string_view verb = op.name.substr(op.name.find("::") + 2);
  return op.arity == 2 ? evaluate_binary(op, verb, operands[0], operands[1]) : evaluate_unary(op, verb, operands[0]);
}

std::optional<size_t> list_position(int64_t index, size_t length) {
  const auto signed_length = static_cast<int64_t>(length);
  if (index < -signed_length || index >= signed_length) return std::nullopt;
  return static_cast<size_t>(index < 0 ? index + signed_length : index);
}

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
