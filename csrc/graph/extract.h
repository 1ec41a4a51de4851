// SPDX-License-Identifier: Apache-2.0
#pragma once
// Takes the prefix out of a graph: the nodes that the boundary values need and nothing else, with a key on each output.
//
// A key is a structural hash of the expression that computes the value: operators, literals, producers, leaves by index
// and dtype, constants by their content's digest. The same value has the same key in whichever graph it is computed, so
// the trainer looks values up by expression and never by the plan that shipped them. Names, labels, groups and lines do
// not enter it. A random draw's key also counts the draws before it, for two draws are two values, and names whose
// draws they are, where two graphs would else have the same.

#include <cstdint>
#include <span>
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
// prefix's const inputs, in order. A plan that moves nothing gives a graph without outputs. `settings` are those of the
// process that results follow from, where they are not the usual ones: values that are computed under others have other
// keys.
Result<Graph> extract_prefix(const Graph& graph, const Plan& plan, std::string_view draws_of = {},
                             std::string_view settings = {});

// Which of the constants of `whole`, by their order among its const inputs, the const inputs of a part of it are.
std::vector<size_t> constants_of(const Graph& part, const Graph& whole);

// How a prefix is computed by a worker whose kernels are not the trainer's: the worker runs the nodes that are exact
// everywhere, up to the first that are not, and hands their values over. The trainer runs the rest.
struct PrefixSplit {
  std::vector<ValueId> handed_over;  // outputs of the prefix that are exact, and what the rest reads
  std::vector<std::string> keys;     // by handed_over
};

// `is_exact` is by node of the annotated prefix. Nothing is handed over where no exact node computes anything.
PrefixSplit split_prefix(const Graph& prefix, const std::vector<bool>& is_exact);

// The worker's part. Its outputs are those values with their keys.
Result<Graph> front_of(const Graph& prefix, const PrefixSplit& split);

// The dtype and the number of dimensions of a value that was handed over.
struct GivenForm {
  Dtype dtype = Dtype::kFloat32;
  uint32_t rank = 0;

  friend bool operator==(const GivenForm&, const GivenForm&) = default;
};

// The trainer's part: the other outputs of the prefix, from leaves of the batch and the values that were handed over,
// which are leaves from `first_leaf_index` on.
Result<Graph> rest_of(const Graph& prefix, const PrefixSplit& split, std::span<const GivenForm> forms,
                      uint32_t first_leaf_index);

}  // namespace penstock::graph
