// SPDX-License-Identifier: Apache-2.0
#pragma once
// calibrate() measures the inputs of a plan's prices on one batch: the seconds of each node that could move, the bytes
// of each value, and which values share memory. Operators that the program runs on a device are timed there, with the
// device's events.

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/clock.h"
#include "base/result.h"
#include "graph/effects.h"
#include "graph/ir.h"
#include "graph/price.h"
#include "runtime/operator_call.h"

namespace penstock::runtime {

struct CalibrateOptions {
  int round_count = 7;       // medians are taken over these, after one round that does not count
  double seconds_max = 2.0;  // no further round is started after this long
  std::function<Instant()> clock = clock_now;
};

// `constants` are the tensors of the graph's const and state inputs, in order; state tensors may be left out, since
// their readers are not run. Leaves the caller's generators, grad mode and thread count as they were. Worker times are
// measured on one thread, as in a worker, whose heap keeps its pages: the time of page faults is subtracted. Trainer
// times are measured with the caller's number of threads, page faults included; operators that the program runs on a
// device are timed there, too (time_on_devices). May take round_count times the prefix's time for each of the two.
Result<graph::Calibration> calibrate(const graph::Graph& graph, std::span<const graph::Verdict> verdicts,
                                     std::span<const at::Tensor> leaves,
                                     std::span<const std::optional<at::Tensor>> constants,
                                     const CalibrateOptions& options = {});

// How long operators take on the device on which the program runs them.
struct DeviceTimes {
  // By node of the graph: seconds on the device, including the start of its kernels. For a node that was not timed (it
  // draws, has no kernel there, or there was no memory for it), an estimate from its bytes and a small device's memory
  // bandwidth. 0 for nodes that are not on a device or cannot move.
  std::vector<double> node_s;
  // Bytes per second from pinned host memory to the device; 0 if not measured.
  double copy_bytes_per_s = 0;
};

// Measures these times with the device's events. `values` holds the values of all movable nodes and of their operands,
// on the CPU. Each node is run on copies of its operands, one after the other on the current stream of the calling
// thread, which waits for them. Draws no random number. The caller holds an ExecutionGuard.
DeviceTimes time_on_devices(const graph::Graph& graph, std::span<const graph::Verdict> verdicts, const Frame& values,
                            int round_count);

}  // namespace penstock::runtime
