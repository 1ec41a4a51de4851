// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which call of the user's program hands which bytes to which: shown beside places and prices. A call is a group of
// nodes; nodes without a group are left out.

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
  std::optional<uint32_t> leaf;    // of the batch, where that is the source
  int64_t bytes = 0;               // each storage once

  friend bool operator==(const CallEdge&, const CallEdge&) = default;
};

struct CallFlow {
  std::map<uint32_t, int64_t> made_bytes;  // by call: memory that it allocates and others read
  std::vector<CallEdge> edges;             // in the order of the first value that is handed on
};

// `extents` is by value; a value whose size is not known has no storage, and counts as no bytes. Operators that look at
// sizes alone are handed nothing.
CallFlow call_flow(const Graph& graph, std::span<const ValueSize> extents);

}  // namespace penstock::graph
