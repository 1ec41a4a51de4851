// SPDX-License-Identifier: Apache-2.0
#pragma once
// The seeds of all random numbers in one epoch.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <vector>

#include "base/seed_sequence.h"

namespace penstock::wire {

// The purpose of a sample's seed. For collation, a batch counts as the sample at its first place.
enum class SampleSeed : uint8_t {
  kGlobals = 0,    // torch's default generator, and the generators of Python's random and numpy
  kGenerator = 1,  // the generator that is passed to the dataset
  kCollate = 2,    // as kGlobals, during collation of the samples
};

// A value type. The seeds of batches and samples are as defined in python/penstock/stream/batch_seeds.py.
struct EpochSeeds {
  int64_t base_seed = 0;
  int64_t epoch = 0;  // counts the epochs of a loader, from 0
  // Each sample has separate seeds, by its place in the order of the epoch, regardless of its batch.
  bool by_sample = false;

  // The seed of the draws of an offloaded model in this epoch.
  uint64_t seed_of_draws() const { return derive({}); }
  // The seed of torch's default generator for one place in the epoch: the batch's number for a map-style dataset; for
  // an iterable one the shard and the batch's number in it from 1, where 0 denotes the start of the shard.
  uint64_t seed_of_batch(std::span<const uint64_t> place) const { return derive(place); }
  // The seed of one sample of a map-style dataset: by its batch and its place in the batch.
  uint64_t seed_of_sample(uint64_t sequence, uint64_t place) const {
    return derive(std::array<uint64_t, 2>{sequence, place});
  }
  // With by_sample: a seed of the sample at a place in the order of the epoch.
  uint64_t seed_at(uint64_t order_place, SampleSeed which) const {
    return derive(std::array<uint64_t, 2>{order_place, static_cast<uint64_t>(which)});
  }

  // The form sent to workers: three integers, in the format of a request's indices.
  std::vector<std::byte> to_bytes() const {
    const std::array<int64_t, 3> words = {base_seed, epoch, by_sample ? 1 : 0};
    const auto bytes = std::as_bytes(std::span(words));
    return {bytes.begin(), bytes.end()};
  }
  // Empty for bytes of another length.
  static std::optional<EpochSeeds> from_bytes(std::span<const std::byte> bytes) {
    std::array<int64_t, 3> words{};
    if (bytes.size() != sizeof words) return std::nullopt;
    std::memcpy(words.data(), bytes.data(), sizeof words);
    return EpochSeeds{.base_seed = words[0], .epoch = words[1], .by_sample = words[2] != 0};
  }

  friend bool operator==(const EpochSeeds&, const EpochSeeds&) = default;

 private:
  uint64_t derive(std::span<const uint64_t> place) const {
    std::vector<uint64_t> key = {static_cast<uint64_t>(epoch)};
    key.insert(key.end(), place.begin(), place.end());
    const auto words = SeedSequence(static_cast<uint64_t>(base_seed), key).generate(2);
    return uint64_t{words[0]} << 32 | words[1];
  }
};

}  // namespace penstock::wire
