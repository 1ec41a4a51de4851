// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which tensors of a batch are written with fewer bytes (wire/narrow.h), by the price: the time that the link saves
// against the time that writing and reading them so takes. A tensor that did not fit a few times in a row is looked at
// again only now and then.

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "worker/slab_writer.h"

namespace penstock::worker {

// Whether a tensor of `plain_bytes` that can be written in `narrow_bytes` is better written so, for a link of so many
// bytes a second; 0: nothing is known of it.
bool is_narrow_worthwhile(uint64_t plain_bytes, uint64_t narrow_bytes, double link_bytes_per_s);

// Confined to the thread that makes batches.
class Narrowing {
 public:
  // Chooses the forms of the tensors of `content` but for those that are withheld. Empty where none is worth it.
  std::vector<std::optional<wire::NarrowForm>> forms_of(const BatchContent& content, double link_bytes_per_s);

 private:
  struct Memory {
    uint32_t misses = 0;   // in a row
    uint32_t skipped = 0;  // since the last look
  };

  std::map<size_t, Memory> by_tensor_;
};

}  // namespace penstock::worker
