// SPDX-License-Identifier: Apache-2.0
#pragma once
// Measures the inputs of a plan's prices on one batch: the seconds of each node that could move, the bytes of each
// value, and which values share memory.

#include <ATen/core/Tensor.h>

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "base/instant.h"
#include "base/live_clock.h"
#include "base/result.h"
#include "graph/effects.h"
#include "graph/ir.h"
#include "graph/price.h"

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
// device are timed there, too (device_times.h). May take round_count times the prefix's time for each of the two.
Result<graph::Calibration> calibrate(const graph::Graph& graph, std::span<const graph::Verdict> verdicts,
                                     std::span<const at::Tensor> leaves,
                                     std::span<const std::optional<at::Tensor>> constants,
                                     const CalibrateOptions& options = {});

}  // namespace penstock::runtime
