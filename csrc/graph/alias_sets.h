// SPDX-License-Identifier: Apache-2.0
#pragma once
// Tracks which values of a graph may share memory, as disjoint sets.

#include <numeric>
#include <vector>

#include "graph/traits.h"

namespace penstock::graph {

// Thread-compatible once built; find() of a const set does not compress.
class AliasSets {
 public:
  explicit AliasSets(size_t value_count) : parents_(value_count) { std::iota(parents_.begin(), parents_.end(), 0); }

  void unite(ValueId a, ValueId b) {
    const ValueId root_a = compress(a);
    const ValueId root_b = compress(b);
    // The smaller id is the representative, so the sets do not depend on the order of the calls.
    if (root_a < root_b) parents_[root_b] = root_a;
    if (root_b < root_a) parents_[root_a] = root_b;
  }

  ValueId find(ValueId value) const {
    while (parents_[value] != value) value = parents_[value];
    return value;
  }

 private:
  ValueId compress(ValueId value) {
    while (parents_[value] != value) value = parents_[value] = parents_[parents_[value]];
    return value;
  }

  std::vector<ValueId> parents_;
};

}  // namespace penstock::graph
