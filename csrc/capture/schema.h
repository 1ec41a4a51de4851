// SPDX-License-Identifier: Apache-2.0
#pragma once
// Finds a node's operator in torch's dispatcher and arranges its arguments by the operator's schema.

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "graph/ir.h"

namespace penstock::capture {

// Prefix for the name of an operator of another library that the user has declared free of side effects, with results
// that do not share memory with other tensors.
inline constexpr std::string_view kDeclared = "declared::";

struct MatchedCall {
  c10::OperatorHandle op;
  std::vector<const graph::Argument*> arguments;  // by argument of the schema; null if its default is used
};

// "aten::sub.Tensor"; none if the dispatcher has no such operator.
std::optional<c10::OperatorHandle> find_operator(std::string_view name);

// Returns kUnsupported if the operator is neither aten's nor declared, or does not exist; kMalformed if its schema has
// no room for an argument, lacks one, or has another number of results. Types are not checked. The result points into
// `node`.
Result<MatchedCall> match_schema(const graph::Node& node);

// Returns the argument of that name, or null if the schema has none or its default is used.
const graph::Argument* argument_named(const MatchedCall& call, std::string_view name);

}  // namespace penstock::capture
