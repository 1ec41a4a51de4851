// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which arguments an operator writes, and which operator of torch's may stand for another: a functional one for a
// write, one that takes a number for one that takes a tensor. All front ends ask here.

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <set>
#include <string>
#include <vector>

namespace penstock::capture {

// Positions in the operator's schema.
struct WrittenArgument {
  size_t position = 0;
  std::optional<size_t> flag{};  // it is written only where this argument is not false

  friend bool operator==(const WrittenArgument&, const WrittenArgument&) = default;
};

// By the schema, and by the facts that schemas leave out (families.h).
std::vector<WrittenArgument> written_arguments(const c10::OperatorHandle& op);

struct FunctionalTwin {
  std::string name;            // "aten::sub.Tensor"
  bool is_view_alone = false;  // the write changes how memory is looked at, and no data
};

// The operator of aten that computes the values that an in-place operator writes, with the same arguments:
// aten::sub.Tensor for aten::sub_.Tensor. None for an operator that is not in place, that draws random numbers, or that
// has no such twin.
std::optional<FunctionalTwin> functional_twin(const c10::OperatorHandle& op);

// The overload that takes numbers in the places of these tensors: aten::sub.Scalar of aten::sub.Tensor. Python wraps
// such a number in a tensor, and so does that overload. None where there is no such overload.
std::optional<std::string> overload_with_numbers(const c10::OperatorHandle& op, const std::set<size_t>& positions);

}  // namespace penstock::capture
