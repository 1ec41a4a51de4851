// SPDX-License-Identifier: Apache-2.0
#pragma once
// The seeds that the random numbers of one epoch follow from.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/seed_sequence.h"

namespace penstock::loader {

// A value type.
struct EpochSeeds {
  int64_t base_seed = 0;
  int64_t epoch = 0;  // counts the epochs of a loader, from 0

  // The seed of the draws of an offloaded model in this epoch.
  uint64_t seed_of_draws() const {
    const std::array<uint64_t, 1> key = {static_cast<uint64_t>(epoch)};
    const auto words = SeedSequence(static_cast<uint64_t>(base_seed), key).generate(2);
    return uint64_t{words[0]} << 32 | words[1];
  }

  // As workers are told them: two integers, as the indices of a request are written.
  std::vector<std::byte> to_bytes() const {
    const std::array<int64_t, 2> words = {base_seed, epoch};
    const auto bytes = std::as_bytes(std::span(words));
    return {bytes.begin(), bytes.end()};
  }

  friend bool operator==(const EpochSeeds&, const EpochSeeds&) = default;
};

}  // namespace penstock::loader
