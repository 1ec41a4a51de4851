// SPDX-License-Identifier: Apache-2.0
#pragma once
// Measures how long operators take on the device on which the program runs them, with the device's events.

#include <span>
#include <vector>

#include "graph/effects.h"
#include "graph/ir.h"
#include "runtime/operator_call.h"

namespace penstock::runtime {

struct DeviceTimes {
  // By node of the graph: seconds on the device, including the start of its kernels. For a node that was not timed (it
  // draws, has no kernel there, or there was no memory for it), an estimate from its bytes and a small device's memory
  // bandwidth. 0 for nodes that are not on a device or cannot move.
  std::vector<double> node_s;
  // Bytes per second from pinned host memory to the device; 0 if not measured.
  double copy_bytes_per_s = 0;
};

// `values` holds the values of all movable nodes and of their operands, on the CPU. Each node is run on copies of its
// operands, one after the other on the current stream of the calling thread, which waits for them. Draws no random
// number. The caller holds an ExecutionGuard.
DeviceTimes time_on_devices(const graph::Graph& graph, std::span<const graph::Verdict> verdicts, const Frame& values,
                            int round_count);

}  // namespace penstock::runtime
