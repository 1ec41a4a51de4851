// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs the nodes that depend only on constants once, before the first batch: a resampling kernel, a mask of fixed size,
// the reciprocal of a deviation. Sizes of the batch are not constants.

#include <cstddef>
#include <span>
#include <vector>

#include "graph/ir.h"
#include "runtime/kernel_settings.h"
#include "runtime/operator_call.h"

namespace penstock::runtime {

// The maximal memory that folding may keep for the life of an executor. Further nodes run for each batch, as if they
// were not constant.
inline constexpr size_t kFoldedBytesMax = size_t{64} << 20;

struct Folding {
  Frame start;                  // the constants, and the values computed from them
  std::vector<bool> is_folded;  // by node
  size_t node_count = 0;        // of the folded nodes
  KernelSettings settings;      // with other settings the nodes could give other bits

  // Whether running the nodes on the calling thread would give exactly these values now.
  bool holds_now() const { return node_count > 0 && settings == KernelSettings::now(); }
};

// For an annotated graph without writes; `constants` is the frame that it starts from. Does not fold values that may
// share memory with an output, since the user may write to an output, nor nodes that fail: they fail in the run.
Folding fold_constants(const graph::Graph& graph, std::span<const OperatorCall> calls, const Frame& constants,
                       size_t bytes_max = kFoldedBytesMax);

}  // namespace penstock::runtime
