// SPDX-License-Identifier: Apache-2.0
#pragma once
// numpy.random.SeedSequence: words that are practically independent for every entropy and spawn key, identical on every
// machine and in every version. The algorithm is described in
// https://numpy.org/doc/stable/reference/random/bit_generators/generated/numpy.random.SeedSequence.html, after
// M. E. O'Neill's seed_seq_fe (https://www.pcg-random.org/posts/developing-a-seed_seq-alternative.html).

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace penstock {

class SeedSequence {
 public:
  // As SeedSequence(entropy, spawn_key=spawn_key) with a pool of four words.
  explicit SeedSequence(uint64_t entropy, std::span<const uint64_t> spawn_key = {});

  // As generate_state(count).
  std::vector<uint32_t> generate(size_t count) const;

 private:
  std::array<uint32_t, 4> pool_{};
};

}  // namespace penstock
