// SPDX-License-Identifier: Apache-2.0
#pragma once
// Takes the prefix out of a graph: the nodes that the boundary values need and nothing else, with a key on each output.
//
// A key is a structural hash of the expression that computes the value: operators, literals, producers, leaves by index
// and dtype, constants by their content's digest. The same value has the same key in whichever graph it is computed, so
// the trainer looks values up by expression and never by the plan that shipped them. Names, labels, groups and lines do
// not enter it. A random draw's key also counts the draws before it, for two draws are two values, and names whose
// draws they are, where two graphs would else have the same.

#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "graph/ir.h"
#include "graph/plan.h"

namespace penstock::graph {

// Keys by value; empty for a value that depends on state or on a constant without a digest.
std::vector<std::string> value_keys(const Graph& graph, std::string_view draws_of = {});

// kUnsupported when a constant that the prefix needs has no digest. The constants to pass to the executor are the
// prefix's const inputs, in order. A plan that moves nothing gives a graph without outputs.
Result<Graph> extract_prefix(const Graph& graph, const Plan& plan, std::string_view draws_of = {});

}  // namespace penstock::graph
