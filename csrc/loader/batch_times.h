// SPDX-License-Identifier: Apache-2.0
#pragma once
// The worker that made a batch and the times of the batch's stages, by the trainer's clock: the step ledger attributes
// waits by them.

#include <algorithm>

#include "base/instant.h"
#include "wire/batch_facts.h"

namespace penstock::loader {

struct BatchTimes {
  uint64_t worker_id = 0;  // the worker's identity in a pool, its number if it is local
  Instant asked_at{};      // the trainer decided to request it
  Instant made_at{};       // a worker had made it; for a remote worker, converted to this clock by estimate
  Instant arrived_at{};    // all its bytes had arrived
  Instant staged_at{};     // it had passed the stages
};

// The time that a worker spent on each part of a batch.
struct MakingTimes {
  Duration dataset{0};
  Duration collate{0};  // includes the copy into shared memory
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
