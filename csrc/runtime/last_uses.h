// SPDX-License-Identifier: Apache-2.0
#pragma once
// Determines when the values of a graph may be freed.

#include <vector>

#include "graph/ir.h"

namespace penstock::runtime {

// By node: the values that are not read after it, including its unread results. Outputs are not freed.
inline std::vector<std::vector<graph::ValueId>> last_uses(const graph::Graph& graph) {
  std::vector<bool> is_read_later(graph.value_names.size());
  for (const graph::Output& output : graph.outputs) is_read_later[output.value] = true;
  std::vector<std::vector<graph::ValueId>> uses(graph.nodes.size());
  for (size_t i = graph.nodes.size(); i-- > 0;) {
    const auto note = [&](graph::ValueId value) {
      if (!is_read_later[value]) uses[i].push_back(value);
      is_read_later[value] = true;
    };
    for (const graph::ValueId result : graph.nodes[i].results) note(result);
    graph::for_each_operand(graph.nodes[i], note);
  }
  return uses;
}

}  // namespace penstock::runtime
