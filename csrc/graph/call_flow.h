// SPDX-License-Identifier: Apache-2.0
#pragma once
// Computes which call of the user's program passes which bytes to which other call: shown with places and prices. A
// call is a group of nodes; nodes without a group are left out.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "graph/ir.h"
#include "graph/price.h"

namespace penstock::graph {

struct CallEdge {
  std::optional<uint32_t> source;  // the call that makes the values; none: the batch
  std::optional<uint32_t> target;  // the call that reads them; none: they are results of the graph
  std::optional<uint32_t> leaf;    // of the batch, if it is the source
  int64_t bytes = 0;               // each storage once

  friend bool operator==(const CallEdge&, const CallEdge&) = default;
};

struct CallFlow {
  std::map<uint32_t, int64_t> made_bytes;  // by call: memory that it allocates and others read
  std::vector<CallEdge> edges;             // in the order of the first value that is passed
};

// `extents` is by value; a value of unknown size has no storage, and counts as no bytes. No bytes are passed to
// operators that only read sizes.
CallFlow call_flow(const Graph& graph, std::span<const ValueSize> extents);

}  // namespace penstock::graph
