// SPDX-License-Identifier: Apache-2.0
#pragma once
// The division of a batch's leaves among the ranks of a group: which leaves a rank does not read, and therefore neither
// receives nor sees.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"

namespace penstock::replica {

// Who reads a leaf, or all leaves of a container. Leaves that no entry names are read by all.
struct LeafReaders {
  std::string name;             // as wire::NamedLeaf::name, or its start up to a dot
  bool is_read_here = true;     // by the program of this rank
  std::vector<bool> followers;  // by each follower, or by a rank that gets its batches from it
};

// The leaves of one batch that are left out, by their indices in its table, ascending.
struct LeafDivision {
  std::vector<uint32_t> absent_here;
  std::vector<std::vector<uint32_t>> absent;  // for each follower
};

// Divides the leaves of a batch. A tensor that occurs under two names is left out only where neither is read.
// kUnsupported, with a text for the program: if a name is not in the batch, or a leaf that it names can have no
// placeholder (wire::fixed_leaves), or the batch is a pickle.
Result<LeafDivision> divide_leaves(std::span<const std::byte> nest, std::span<const LeafReaders> readers,
                                   size_t follower_count);

}  // namespace penstock::replica
