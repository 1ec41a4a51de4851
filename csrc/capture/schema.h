// SPDX-License-Identifier: Apache-2.0
#pragma once
// Finds a node's operator in torch's dispatcher and lays its arguments out as the operator's schema does.

#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "graph/ir.h"

namespace penstock::capture {

// Stands before the name of an operator of another library that the user has declared to have no effect but its
// results, which share no memory with anything.
inline constexpr std::string_view kDeclared = "declared::";

struct MatchedCall {
  c10::OperatorHandle op;
  std::vector<const graph::Argument*> arguments;  // by argument of the schema; null where its default stands
};

// "aten::sub.Tensor"; none when the dispatcher has no such operator.
std::optional<c10::OperatorHandle> find_operator(std::string_view name);

// kUnsupported when the operator is neither aten's nor declared, or is not there; kMalformed when its schema has no
// room for an argument, lacks one, or has another number of results. Types are not looked at. Points into `node`.
Result<MatchedCall> match_schema(const graph::Node& node);

// The argument of that name, or null when the schema has none or its default stands.
const graph::Argument* argument_named(const MatchedCall& call, std::string_view name);

}  // namespace penstock::capture
