// SPDX-License-Identifier: Apache-2.0
#pragma once
// Determines which nodes make a second view of memory that the user has. The results of forward belong to the user, who
// may write to them. If two results share memory, or a result and an input, each view of that memory stays, and so do
// the views in between: if sent they would be copies, and a write to one of them would not be seen in the others. The
// memory itself may still be made by a worker.

#include <span>
#include <vector>

#include "graph/alias_sets.h"
#include "graph/ir.h"

namespace penstock::graph {

// Returns the result by node. `known_outside` are values that nodes make but that the user can access, as if they were
// inputs.
std::vector<bool> second_views(const Graph& graph, const AliasSets& aliases, std::span<const ValueId> known_outside);

}  // namespace penstock::graph
