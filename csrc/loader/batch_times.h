// SPDX-License-Identifier: Apache-2.0
#pragma once
// Who made a batch, and when it was where, by the trainer's clock: what the step ledger tells waiting apart by.

#include <algorithm>

#include "base/instant.h"
#include "wire/batch_facts.h"

namespace penstock::loader {

struct BatchTimes {
  uint64_t worker_id = 0;  // that made it: the identity of a pool's, the number of a local one
  Instant asked_at{};      // the trainer decided to ask for it
  Instant made_at{};       // a worker had made it; of a worker elsewhere, as its clock is known here
  Instant arrived_at{};    // all its bytes were here
  Instant staged_at{};     // the stages were through with it
};

// How long a worker took for the parts of a batch.
struct MakingTimes {
  Duration dataset{0};
  Duration collate{0};  // with copying the batch into shared memory
  Duration prefix{0};

  Duration whole() const { return dataset + collate + prefix; }

  static MakingTimes of(const wire::BatchFacts& facts) {
    const Duration fetch = facts.fetch_time * Duration(wire::kTimeUnit);
    const Duration prefix = std::min(fetch, facts.prefix_time * Duration(wire::kTimeUnit));
    const Duration dataset = std::min(fetch - prefix, facts.samples.dataset_time * Duration(wire::kTimeUnit));
    return {.dataset = dataset, .collate = fetch - prefix - dataset, .prefix = prefix};
  }
};

}  // namespace penstock::loader
