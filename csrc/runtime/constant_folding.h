// SPDX-License-Identifier: Apache-2.0
#pragma once
// Runs the nodes that depend on constants alone once, before there is a batch: a resampling kernel, a mask of fixed
// size, the reciprocal of a deviation. Sizes of the batch are no constants.

#include <cstddef>
#include <span>
#include <vector>

#include "graph/ir.h"
#include "runtime/kernel_settings.h"
#include "runtime/operator_call.h"

namespace penstock::runtime {

// The most memory that folding may keep for the life of an executor. Beyond it a node is run for each batch, as if it
// were not constant.
inline constexpr size_t kFoldedBytesMax = size_t{64} << 20;

struct Folding {
  Frame start;                  // the constants, and the values computed from them
  std::vector<bool> is_folded;  // by node
  size_t node_count = 0;        // of those
  KernelSettings settings;      // under others the nodes could give other bits

  // Whether a run of the calling thread would compute just these values now.
  bool holds_now() const { return node_count > 0 && settings == KernelSettings::now(); }
};

// For an annotated graph of which nothing writes, `constants` being the frame that it starts from. Not folded are
// values that an output may share memory with, for the user may write to an output, and nodes that fail: they fail in
// the run.
Folding fold_constants(const graph::Graph& graph, std::span<const OperatorCall> calls, const Frame& constants,
                       size_t bytes_max = kFoldedBytesMax);

}  // namespace penstock::runtime
