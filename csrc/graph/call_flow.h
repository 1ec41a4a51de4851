// SPDX-License-Identifier: Apache-2.0
#pragma once
// Relations between the calls of a captured program: the bytes that they pass to each other (CallFlow), the calls that
// a part of the program needs (NeededCalls), and the calls that repeat an earlier one (without_repetitions).

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "graph/ir.h"
#include "graph/price.h"

namespace penstock::graph {

// An edge of CallFlow.
struct CallEdge {
  std::optional<uint32_t> source;  // the call that makes the values; none: the batch
  std::optional<uint32_t> target;  // the call that reads them; none: they are results of the graph
  std::optional<uint32_t> leaf;    // of the batch, if it is the source
  int64_t bytes = 0;               // each storage once

  friend bool operator==(const CallEdge&, const CallEdge&) = default;
};

// Which call of the user's program passes which bytes to which other call: shown with places and prices. A call is a
// group of nodes; nodes without a group are left out.
struct CallFlow {
  std::map<uint32_t, int64_t> made_bytes;  // by call: memory that it allocates and others read
  std::vector<CallEdge> edges;             // in the order of the first value that is passed
};

// `extents` is by value; a value of unknown size has no storage, and counts as no bytes. No bytes are passed to
// operators that only read sizes.
CallFlow call_flow(const Graph& graph, std::span<const ValueSize> extents);

// A call as NeededCalls knows it.
struct CapturedCall {
  uint32_t unit = 0;
  bool is_droppable = false;        // it does not compute, so it may run even if its unit may not
  bool reads_intermediate = false;  // a value that is not the result of a call, so it cannot be assembled
  std::vector<uint32_t> reads{};    // calls whose results are not available otherwise
};

// Why a call cannot run.
struct CallFault {
  enum class Kind : uint8_t { kForbidden, kReadsIntermediate };
  Kind kind = Kind::kForbidden;
  uint32_t call = 0;
  std::optional<uint32_t> reader{};  // the call that needs it, if it was not requested itself

  friend bool operator==(const CallFault&, const CallFault&) = default;
};

// Determines which calls of a captured program have to run to assemble a part of it: the requested calls, the calls
// whose results they read, and the other calls of their units, which write to the same memory. Calls are given in
// program order and identified by their place in it. Thread-compatible.
class NeededCalls {
 public:
  NeededCalls(std::vector<CapturedCall> calls, std::set<uint32_t> forbidden_units);

  // Requests a call and all that it needs. After a fault the set must not be used.
  std::optional<CallFault> need(uint32_t call);
  // Requests a region of the program: its first and last call have to enclose the calls between them, if one of these
  // is needed.
  void need_region(uint32_t first, uint32_t last);

  const std::set<uint32_t>& calls() const { return needed_; }

 private:
  const std::vector<CapturedCall> calls_;
  const std::set<uint32_t> forbidden_;
  std::vector<std::vector<uint32_t>> members_;  // by unit, without droppable calls
  std::set<uint32_t> needed_;
};

// Returns the annotated graph without nodes that repeat another, with the same operator and the same literals on the
// same values: readers of their results read the first node's. Programs have many: each use of a normalised input
// normalises it, each attention layer makes the same mask. Values keep their ids, so the values of dropped nodes are no
// longer made by any node. Outputs that were separate may then share memory.
//
// Only operators that are known and do not draw are compared. A graph with a write, or a possible write, is returned
// unchanged: there the same call may give another value later.
Graph without_repetitions(Graph graph);

}  // namespace penstock::graph
