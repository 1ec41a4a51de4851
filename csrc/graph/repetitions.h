// SPDX-License-Identifier: Apache-2.0
#pragma once
// Finds calls that compute the same as an earlier call: the same operator with the same literals on the same values.
// Programs have many: each use of a normalised input normalises it, each attention layer makes the same mask.

#include <vector>

#include "graph/ir.h"

namespace penstock::graph {

// The annotated graph without the nodes that repeat another: readers of their results read the first one's. Values keep
// their ids, so no node makes those of dropped nodes any more. Outputs that were apart may share memory then.
//
// Only operators that are known and draw nothing are compared. A graph with a write, or a possible write, is returned
// unchanged: there the same call may give another value later.
Graph without_repetitions(Graph graph);

}  // namespace penstock::graph
