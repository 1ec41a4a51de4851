// SPDX-License-Identifier: Apache-2.0
#pragma once
// On which device the values of a program are that was read before it ran, as TorchScript is. Of such a program the
// devices of its inputs are known, and no more; those of all other values follow from them, and their dtypes from a run
// on meta tensors.

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <optional>
#include <span>
#include <vector>

#include "graph/ir.h"

namespace penstock::runtime {

struct PlacedGraph {
  // The graph, with the same values and nodes. Nodes on a device say so, and what names a device is as a worker runs
  // it: a copy to a device is a copy, and a twin with the device's bits stands where there is one. Annotated.
  graph::Graph graph;
  std::vector<std::optional<c10::Device>> devices;  // by value; none for the CPU, and for what is no tensor
};

// `leaves` are those of a batch, by leaf index, and `constants` the tensors of the const and state inputs, in their
// order; all where the program has them.
PlacedGraph place_on_devices(const graph::Graph& graph, std::span<const at::Tensor> leaves,
                             std::span<const at::Tensor> constants);

// The same tensors on the CPU.
std::vector<at::Tensor> on_host(std::span<const at::Tensor> tensors);

}  // namespace penstock::runtime
