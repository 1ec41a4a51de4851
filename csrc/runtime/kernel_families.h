// SPDX-License-Identifier: Apache-2.0
#pragma once
// Determines which family of kernels computes a node. Two processes have to agree in the fingerprint of that family for
// the node to give the same bits in both. Fails closed: an operator that is in no table is of kOther, for which
// everything has to agree.

#include <vector>

#include "base/numerics.h"
#include "graph/ir.h"

namespace penstock::runtime {

// By node of an annotated graph.
std::vector<NumericFamily> kernel_families(const graph::Graph& graph);

}  // namespace penstock::runtime
