// SPDX-License-Identifier: Apache-2.0
#pragma once
// The figures of a running loader. LoaderCounters has its counters, BatchTimes and MakingTimes the times of one batch.

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/clock.h"
#include "wire/message.h"

namespace penstock::loader {

// Thread-safe.
class Counter {
 public:
  void add(uint64_t amount) { value_.fetch_add(amount, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// The number of stages to which a wait for a batch is attributed (step_ledger.h).
inline constexpr size_t kWaitPlaceCount = 7;

// The counters only report: no decision depends on them. Thread-safe.
struct LoaderCounters {
  Counter batches;                 // delivered to the trainer
  Counter batch_bytes;             // size of their payloads
  Counter copied_batches;          // copied to separate memory because the user holds many slabs
  Counter inline_batches;          // received through the socket because no shared memory was available
  Counter stale_batches;           // dropped answers to requests of an earlier epoch
  Counter early_batches;           // delivered, and requested before their epoch started
  Counter wait_ns;                 // total time that the trainer waited for batches
  Counter waits;                   // number of these waits
  Counter fetch_ns;                // time that workers spent on the delivered batches
  Counter prefix_ns;               // part of fetch_ns: for boundary tensors
  Counter arenas;                  // arenas mapped
  Counter boundary_batches;        // batches with boundary tensors
  Counter compiled_batches;        // batches with boundary tensors computed by compiled code
  Counter withheld_bytes;          // of leaves that stayed with their workers
  Counter recalled_batches;        // batches with a withheld leaf that was read after all
  Counter device_widened_batches;  // batches with tensors that the device widened
  Counter unrepeatable_batches;    // batches whose random numbers several threads drew from one generator
  Counter dataset_ns;              // part of fetch_ns: for the samples
  Counter collate_ns;              // part of fetch_ns: for collating the samples and writing the batch
  Counter wire_ns;                 // from the completion of batches to their arrival
  // Of the training steps, see step_ledger.h.
  Counter steps;
  Counter compute_ns;
  Counter ranks_ns;
  Counter loader_ns;
  std::array<Counter, kWaitPlaceCount> waited_ns;
};

// The worker that made a batch and the times of the batch's stages, by the trainer's clock: the step ledger attributes
// waits by them.
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
