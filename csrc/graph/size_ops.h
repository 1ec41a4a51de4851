// SPDX-License-Identifier: Apache-2.0
#pragma once
// Computations on sizes. A SizeOp is a scalar operator that the graph room implements itself: arithmetic on sizes as in
// Python, sizes of tensors, elements of lists. Captured programs are full of them, and the dispatcher has none;
// README.md has the list for front ends. SizeConditions checks whether a recorded program fits the sizes of a batch.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "base/result.h"
#include "graph/ir.h"

namespace penstock::graph {

using Number = std::variant<bool, int64_t, double>;

enum class SizeOpKind : uint8_t {
  kArithmetic,  // numbers in, a number out
  kMetadata,    // a tensor in, its sizes, rank, element count or dtype out
  kList,        // get(list, index), length(list)
};

struct SizeOp {
  std::string_view name;
  uint8_t arity;
  SizeOpKind kind;
  ValueKind result;  // kUnknown for list::get: any element type
};

std::span<const SizeOp> size_ops();

const SizeOp* find_size_op(std::string_view name);

// Computes an operator of kind kArithmetic. Overflow, a zero divisor and a count other than the arity are errors.
Result<Number> evaluate_size_op(const SizeOp& op, std::span<const Number> operands);

// Returns the position of element `index`, negative from the end, in a list of `length`; none if there is no such
// element.
std::optional<size_t> list_position(int64_t index, size_t length);

// An expression over the symbols of sizes. Truth values are 0 and 1. Division rounds down, and a remainder has the
// divisor's sign, as in Python.
struct SizeExpression {
  enum class Op : uint8_t {
    kInteger,  // `value`
    kSymbol,   // the size at index `value`
    kAdd,
    kMul,
    kFloorDiv,
    kMod,
    kMax,
    kMin,
    kEq,
    kNe,
    kLt,
    kLe,
    kGt,
    kGe,
    kAnd,
    kOr,
    kNot,
  };
  Op op = Op::kInteger;
  int64_t value = 0;
  std::vector<SizeExpression> operands{};  // one for kNot, two for comparisons, at least one for the others
};

// Returns none if it divides by zero, or if a number exceeds 64 bits. A symbol without a size asserts.
std::optional<int64_t> evaluate(const SizeExpression& expression, std::span<const int64_t> sizes);

// Conditions on the sizes of a batch: whether a program that was captured with symbols for some sizes is valid for a
// batch, and which strides the batch's tensors must then have. They are checked at every call, so the result for a
// combination of sizes is cached. Thread-compatible.
class SizeConditions {
 public:
  using Strides = std::vector<std::vector<int64_t>>;
  // How many combinations of sizes are cached before the cache is cleared.
  static constexpr size_t kRememberedMax = 4096;

  SizeConditions(std::vector<SizeExpression> guards, std::vector<std::vector<SizeExpression>> strides)
      : guards_(std::move(guards)), strides_(std::move(strides)) {}

  // Returns the strides of each tensor under these sizes of the symbols, or null if the program is for other sizes.
  // Valid until the next call. Sizes 0 and 1 broadcast and are empty in ways that larger ones are not, so a symbol
  // never represents them.
  const Strides* strides_for(const std::vector<int64_t>& sizes) {
    return strides_for(sizes, [] { return true; });
  }
  // Returns the strides as above under one more condition, which is checked if the others hold and the result is not
  // cached yet.
  template <typename Holds>
  const Strides* strides_for(const std::vector<int64_t>& sizes, const Holds& holds) {
    auto known = answers_.find(sizes);
    if (known == answers_.end()) {
      if (answers_.size() >= kRememberedMax) answers_.clear();
      std::optional<Strides> answer = look(sizes);
      if (answer && !holds()) answer.reset();
      known = answers_.emplace(sizes, std::move(answer)).first;
    }
    return known->second ? &*known->second : nullptr;
  }

 private:
  std::optional<Strides> look(const std::vector<int64_t>& sizes) const;

  const std::vector<SizeExpression> guards_;
  const std::vector<std::vector<SizeExpression>> strides_;
  std::map<std::vector<int64_t>, std::optional<Strides>> answers_;
};

}  // namespace penstock::graph
