// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which batch of a job: its epoch and its number there. Everything that is asked for, answered, acknowledged or dropped
// between a trainer and a pool is named by this, whoever makes it and however often.

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

inline std::string to_text(const BatchKey& key) {
  return "batch " + std::to_string(key.sequence) + " of epoch " + std::to_string(key.epoch);
}

}  // namespace penstock::wire
