// SPDX-License-Identifier: Apache-2.0
#pragma once
// Identifies a batch of a job by its epoch and its number in the epoch. All requests, answers, acknowledgements and
// cancellations between a trainer and a pool use this key, regardless of who makes the batch and how often.

#include <cstdint>
#include <string>
#include <tuple>

namespace penstock::wire {

struct BatchKey {
  uint32_t epoch = 0;
  uint64_t sequence = 0;

  friend bool operator==(const BatchKey&, const BatchKey&) = default;
  friend bool operator<(const BatchKey& a, const BatchKey& b) {
    return std::tie(a.epoch, a.sequence) < std::tie(b.epoch, b.sequence);
  }
};

// A request for the whole of a batch that arrived without some of its leaves: a recall. It has a separate key: the
// batch's key with the highest bit of the sequence set.
constexpr uint64_t kRecallBit = uint64_t{1} << 63;
constexpr bool is_recall(const BatchKey& key) { return (key.sequence & kRecallBit) != 0; }
constexpr BatchKey recall_of(const BatchKey& key) { return {key.epoch, key.sequence | kRecallBit}; }
// The number of the batch in its epoch, for a request and for a recall.
constexpr uint64_t number_of(const BatchKey& key) { return key.sequence & ~kRecallBit; }

inline std::string to_text(const BatchKey& key) {
  if (is_recall(key)) return "the rest of " + to_text(BatchKey{key.epoch, number_of(key)});
  return "batch " + std::to_string(key.sequence) + " of epoch " + std::to_string(key.epoch);
}

}  // namespace penstock::wire
