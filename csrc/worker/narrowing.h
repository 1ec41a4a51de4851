// SPDX-License-Identifier: Apache-2.0
#pragma once
// Decides which tensors of a batch are written with fewer bytes (wire/narrow.h), by price: the time saved on the link
// against the additional time to write and read them. A tensor that did not fit a few times in a row is then examined
// only occasionally.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "worker/slab_writer.h"

namespace penstock::worker {

// Whether it pays off to write a tensor of `plain_bytes` in `narrow_bytes`, for a link of `link_bytes_per_s` (0:
// unknown).
bool is_narrow_worthwhile(uint64_t plain_bytes, uint64_t narrow_bytes, double link_bytes_per_s);

// Confined to the thread that makes batches.
class Narrowing {
 public:
  // Chooses the forms of the tensors of `content`, except withheld ones. Empty if none is worthwhile.
  std::vector<std::optional<wire::NarrowForm>> forms_of(const BatchContent& content, double link_bytes_per_s);

 private:
  struct Memory {
    uint32_t misses = 0;   // consecutive
    uint32_t skipped = 0;  // since the last examination
  };

  std::map<size_t, Memory> by_tensor_;
};

}  // namespace penstock::worker
