// SPDX-License-Identifier: Apache-2.0
#pragma once
// Finds calls that compute the same as an earlier call: the same operator with the same literals on the same values.
// Programs have many: each use of a normalised input normalises it, each attention layer makes the same mask.

#include <vector>

#include "graph/ir.h"

namespace penstock::graph {

// Returns the annotated graph without nodes that repeat another: readers of their results read the first node's. Values
// keep their ids, so the values of dropped nodes are no longer made by any node. Outputs that were separate may then
// share memory.
//
// Only operators that are known and do not draw are compared. A graph with a write, or a possible write, is returned
// unchanged: there the same call may give another value later.
Graph without_repetitions(Graph graph);

}  // namespace penstock::graph
