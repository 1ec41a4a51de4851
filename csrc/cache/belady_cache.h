// SPDX-License-Identifier: Apache-2.0
#pragma once
// A cache that keeps the keys that are read soonest, from the steps to come as far as they are known. A key that was
// missed is kept only if it is read sooner than a key that it would replace. Among keys that no known step reads, the
// most recently read ones are kept.
//
// With keys of one size and all steps known, no cache has fewer misses.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <queue>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

namespace penstock::cache {

// Thread-compatible.
class BeladyCache {
 public:
  static constexpr int64_t kNoSlot = -1;

  // The outcome of a step. A slot is the place of a kept key; places are numbered from 0, and no two keys share one.
  struct Step {
    std::vector<int64_t> slots_before;  // of each key, before the step; kNoSlot for a key that was not kept
    std::vector<int64_t> slots_after;   // the same, after the step
    std::vector<int64_t> evicted;       // keys that were kept before the step and are not kept after it
  };

  // `capacity` is the sum of the sizes of the keys that may be kept.
  explicit BeladyCache(uint64_t capacity) : capacity_(capacity) {}

  // Prepares to read the keys of a step. If other keys were announced for it, all that was announced is forgotten.
  // Returns the number of steps that are known to follow it.
  size_t begin(std::span<const int64_t> keys);

  // Announces the step after the last one that was announced.
  void foresee(std::span<const int64_t> keys);

  // Begins a step and reads its keys, one after the other. `sizes` has the size of each key, at least 1; empty: all
  // are 1.
  Step read(std::span<const int64_t> keys, std::span<const uint64_t> sizes = {});

  // The number of announced steps that were not read.
  size_t foreseen_count() const { return steps_.size(); }
  // Slots of the keys; kNoSlot for a key that is not kept.
  std::vector<int64_t> slots(std::span<const int64_t> keys) const;

  uint64_t capacity() const { return capacity_; }
  uint64_t kept_size() const { return kept_size_; }
  size_t kept_count() const { return kept_.size(); }
  uint64_t hit_count() const { return hit_count_; }
  uint64_t miss_count() const { return miss_count_; }

 private:
  static constexpr uint64_t kNever = ~uint64_t{0};

  // Orders kept keys by the sequence in which they are evicted.
  struct Rank {
    uint64_t next_read;  // number of the next read that is known; kNever without any
    uint64_t last_read;
    int64_t key;

    friend bool operator<(const Rank& one, const Rank& other) {
      if (one.next_read != other.next_read) return one.next_read > other.next_read;
      return one.last_read < other.last_read;
    }
  };
  struct Kept {
    Rank rank;
    uint64_t size;
    int64_t slot;
    uint64_t first_step;
  };

  void forget();
  uint64_t next_read_of(int64_t key) const;
  void set_rank(Kept& kept, const Rank& rank);
  void admit(const Rank& rank, uint64_t size, std::vector<int64_t>& evicted);
  void evict(int64_t key, std::vector<int64_t>& evicted);

  uint64_t capacity_;
  uint64_t kept_size_ = 0;
  uint64_t hit_count_ = 0;
  uint64_t miss_count_ = 0;
  uint64_t read_count_ = 0;      // keys read so far
  uint64_t foreseen_reads_ = 0;  // number of the read after the last announced one
  uint64_t step_count_ = 0;
  std::deque<std::vector<int64_t>> steps_;                   // announced and not read
  std::unordered_map<int64_t, std::deque<uint64_t>> reads_;  // the numbers of a key's reads in `steps_`
  std::unordered_map<int64_t, Kept> kept_;
  std::set<Rank> order_;
  std::priority_queue<int64_t, std::vector<int64_t>, std::greater<>> free_slots_;
  int64_t slot_count_ = 0;
};

}  // namespace penstock::cache
