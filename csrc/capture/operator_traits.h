// SPDX-License-Identifier: Apache-2.0
#pragma once
// The dispatcher's knowledge of operators, corrected by facts that schemas leave out. annotate() (capture.h) is
// implemented here; it fills in the traits of a graph's nodes. The functions below determine which arguments an
// operator writes, and which torch operator may replace another one: a functional operator for one that writes, an
// operator that takes a number for one that takes a tensor. All front ends use them.

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

namespace penstock::capture {

// Positions in the operator's schema.
struct WrittenArgument {
  size_t position = 0;
  std::optional<size_t> flag{};  // the argument is written unless this one is false

  friend bool operator==(const WrittenArgument&, const WrittenArgument&) = default;
};

// From the schema, and from the facts that schemas leave out.
std::vector<WrittenArgument> written_arguments(const c10::OperatorHandle& op);

struct FunctionalVariant {
  std::string name;            // "aten::sub.Tensor"
  bool is_view_alone = false;  // the write changes the view of the data, not the data
};

// Returns the ATen operator that computes the values that an in-place operator writes, with the same arguments:
// aten::sub.Tensor for aten::sub_.Tensor. None for an operator that is not in place, that draws random numbers, or that
// has no such twin.
std::optional<FunctionalVariant> functional_twin(const c10::OperatorHandle& op);

// Returns the overload that takes numbers in place of these tensors: aten::sub.Scalar for aten::sub.Tensor. Python
// wraps such a number in a tensor, and so does that overload. None if there is no such overload.
std::optional<std::string> overload_with_numbers(const c10::OperatorHandle& op, const std::set<size_t>& positions);

}  // namespace penstock::capture
