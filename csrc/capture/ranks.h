// SPDX-License-Identifier: Apache-2.0
#pragma once
// The number of dimensions of a program's tensors, if it follows from its inputs' numbers of dimensions for any sizes.
// Branches on it, such as the ones in a scripted `interpolate`, are decided while the program is read.

#include <cstddef>
#include <optional>
#include <unordered_map>

#include "graph/ir.h"

namespace penstock::capture {

// Confined to the thread that reads.
class Ranks {
 public:
  void set(graph::ValueId value, size_t rank) { ranks_.insert_or_assign(value, rank); }
  std::optional<size_t> find(graph::ValueId value) const;
  // Call after reading a call. A call that may change the dimensions of a tensor in place discards all known ranks.
  void note_call(const graph::Node& call);

 private:
  std::optional<size_t> rank_of(const graph::Argument& argument) const;
  // The maximal number of dimensions of the operands; none if it is unknown for one of them.
  std::optional<size_t> broadcast_rank(const graph::Node& call) const;

  std::unordered_map<graph::ValueId, size_t> ranks_;
};

}  // namespace penstock::capture
