// SPDX-License-Identifier: Apache-2.0
#pragma once
// The scalar operators that the graph room implements itself: arithmetic on sizes as in Python, sizes of tensors,
// elements of lists. Captured programs are full of them, and the dispatcher has none. README.md has the list for front
// ends.

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <variant>

#include "base/result.h"
#include "graph/traits.h"

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

}  // namespace penstock::graph
