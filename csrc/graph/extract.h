// SPDX-License-Identifier: Apache-2.0
#pragma once
// Extracts the prefix from a graph: only the nodes that the boundary values need, with a key on each output.
//
// A key is a structural hash of the expression that computes the value: operators, literals, producers, leaves by index
// and dtype, constants by their content's digest. The same value has the same key in every graph that computes it, so
// the trainer looks values up by expression and never by the plan that sent them. Names, labels, groups and lines are
// not part of the key. A random draw's key also counts the draws before it, since two draws are two values, and
// includes whose draws they are, in case two graphs would otherwise have the same key.

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "graph/ir.h"
#include "graph/plan.h"

namespace penstock::graph {

// Returns the keys by value; empty for a value that depends on state or on a constant without a digest.
std::vector<std::string> value_keys(const Graph& graph, std::string_view draws_of = {});

// Returns kUnsupported if a constant that the prefix needs has no digest. The constants to pass to the executor are the
// prefix's const inputs, in order. A plan without moved groups gives a graph without outputs. `settings` are the
// process settings on which results depend, if they are not the usual ones: values computed under other settings have
// other keys.
Result<Graph> extract_prefix(const Graph& graph, const Plan& plan, std::string_view draws_of = {},
                             std::string_view settings = {});

// Returns which constants of `whole`, by their order among its const inputs, are the const inputs of a part of it.
std::vector<size_t> constants_of(const Graph& part, const Graph& whole);

// Splits a prefix for a worker whose kernels differ from the trainer's: the worker runs the nodes that are exact
// everywhere, up to the first inexact ones, and sends their values. The trainer runs the rest.
struct PrefixSplit {
  std::vector<ValueId> handed_over;  // outputs of the prefix that are exact, and values that the rest reads
  std::vector<std::string> keys;     // by handed_over
};

// `is_exact` is by node of the annotated prefix. The result is empty if no exact node computes anything.
PrefixSplit split_prefix(const Graph& prefix, const std::vector<bool>& is_exact);

// Returns the worker's part. Its outputs are the values handed over, with their keys.
Result<Graph> front_of(const Graph& prefix, const PrefixSplit& split);

// The dtype and the number of dimensions of a value that was handed over.
struct GivenForm {
  Dtype dtype = Dtype::kFloat32;
  uint32_t rank = 0;

  friend bool operator==(const GivenForm&, const GivenForm&) = default;
};

// Returns the trainer's part: the other outputs of the prefix, computed from leaves of the batch and the values that
// were handed over, which are leaves from `first_leaf_index` on.
Result<Graph> rest_of(const Graph& prefix, const PrefixSplit& split, std::span<const GivenForm> forms,
                      uint32_t first_leaf_index);

}  // namespace penstock::graph
