// SPDX-License-Identifier: Apache-2.0
#pragma once
// The counters of a loader while it runs. Any thread may raise and read them at any time.
// They report and never decide.

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace penstock::loader {

// Thread-safe.
class Counter {
 public:
  void add(uint64_t amount) { value_.fetch_add(amount, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// The places of a wait for a batch (step_ledger.h).
inline constexpr size_t kWaitPlaceCount = 7;

// Thread-safe.
struct LoaderCounters {
  Counter batches;                 // delivered to the trainer
  Counter batch_bytes;             // their payloads
  Counter copied_batches;          // copied to memory of their own because the user holds many slabs
  Counter inline_batches;          // came through the socket because no shared memory could be had
  Counter stale_batches;           // answers to requests of an earlier epoch, dropped
  Counter early_batches;           // delivered, and asked for before their epoch began
  Counter wait_ns;                 // the trainer waited for a batch this long
  Counter waits;                   // and this often
  Counter fetch_ns;                // workers spent this long on the batches delivered
  Counter prefix_ns;               // of that, on boundary tensors
  Counter arenas;                  // arenas mapped
  Counter boundary_batches;        // batches that carried boundary tensors
  Counter compiled_batches;        // batches of which compiled code made boundary tensors
  Counter withheld_bytes;          // of leaves that stayed with their workers
  Counter recalled_batches;        // batches of which such a leaf was read after all
  Counter device_widened_batches;  // batches of which the device widened tensors
  Counter unrepeatable_batches;    // batches whose random numbers several threads drew from one generator
  Counter dataset_ns;              // of fetch_ns, on the samples
  Counter collate_ns;              // of it, on making a batch of them and writing it
  Counter wire_ns;                 // from when batches were made to when they were here
  // Of the steps, see step_ledger.h.
  Counter steps;
  Counter compute_ns;
  Counter ranks_ns;
  Counter loader_ns;
  std::array<Counter, kWaitPlaceCount> waited_ns;
};

}  // namespace penstock::loader
