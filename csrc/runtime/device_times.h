// SPDX-License-Identifier: Apache-2.0
#pragma once
// How long operators take on the device that the program runs them on, by the device's own events.

#include <span>
#include <vector>

#include "graph/effects.h"
#include "graph/ir.h"
#include "runtime/operator_call.h"

namespace penstock::runtime {

struct DeviceTimes {
  // By node of the graph: seconds on the device, the start of its kernels included. For a node that was not timed (it
  // draws, has no kernel there, or there was no memory for it) what its bytes would take on a small device. 0 for nodes
  // that are not on a device, or cannot move.
  std::vector<double> node_s;
  // Bytes per second from pinned memory of the host to the device; 0 where that was not measured.
  double copy_bytes_per_s = 0;
};

// `values` are those of all movable nodes and of what they read, on the CPU. Each node is run on copies of its
// operands, one after the other on the current stream of the calling thread, which waits for them. Draws no random
// number. The caller holds an ExecutionGuard.
DeviceTimes time_on_devices(const graph::Graph& graph, std::span<const graph::Verdict> verdicts, const Frame& values,
                            int round_count);

}  // namespace penstock::runtime
