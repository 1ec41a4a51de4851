// SPDX-License-Identifier: Apache-2.0
#pragma once
// Determines the device of each value of a program that was read before it ran, as with TorchScript. Of such a program
// only the devices of its inputs are known; the devices of all other values follow from them, and their dtypes from a
// run on meta tensors.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <span>
#include <vector>

#include "graph/ir.h"

namespace penstock::runtime {

struct PlacedGraph {
  // The graph, with the same values and nodes, annotated. Nodes that run on a device are marked, and arguments that
  // name a device are rewritten for a worker: a copy to a device is a plain copy, and an operator is replaced by its
  // twin with the device's bits if there is one.
  graph::Graph graph;
  std::vector<std::optional<c10::Device>> devices;  // by value; none for the CPU, and for values that are not tensors
};

// `leaves` are the tensors of a batch, by leaf index, and `constants` the tensors of the const and state inputs, in
// order; all on the devices on which the program has them.
PlacedGraph place_on_devices(const graph::Graph& graph, std::span<const at::Tensor> leaves,
                             std::span<const at::Tensor> constants);

// Returns the same tensors on the CPU.
std::vector<at::Tensor> on_host(std::span<const at::Tensor> tensors);

}  // namespace penstock::runtime
