// SPDX-License-Identifier: Apache-2.0
#include "base/seed_sequence.h"

namespace penstock {

namespace {

constexpr uint32_t kHashStart = 0x43b0d7e5;
constexpr uint32_t kHashFactor = 0x931e8875;
constexpr uint32_t kStateStart = 0x8b51f9dd;
constexpr uint32_t kStateFactor = 0x58f38ded;
constexpr uint32_t kMixLeft = 0xca01f9dd;
constexpr uint32_t kMixRight = 0x4973f715;
constexpr uint32_t kShift = 16;

// Each call uses another constant.
uint32_t hash(uint32_t value, uint32_t& constant, uint32_t factor) {
  value ^= constant;
  constant *= factor;
  value *= constant;
  return value ^ (value >> kShift);
}

uint32_t mix(uint32_t left, uint32_t right) {
  const uint32_t mixed = kMixLeft * left - kMixRight * right;
  return mixed ^ (mixed >> kShift);
}

// Least significant word first; 0 is one word.
void append_words(uint64_t value, std::vector<uint32_t>& words) {
  words.push_back(static_cast<uint32_t>(value));
  if (value >> 32 != 0) words.push_back(static_cast<uint32_t>(value >> 32));
}

}  // namespace

SeedSequence::SeedSequence(uint64_t entropy, std::span<const uint64_t> spawn_key) {
  std::vector<uint32_t> words;
  append_words(entropy, words);
  // Padded, so that the words of a spawn key are never mistaken for words of the entropy.
  if (!spawn_key.empty() && words.size() < pool_.size()) words.resize(pool_.size(), 0);
  for (const uint64_t key : spawn_key) append_words(key, words);
  uint32_t constant = kHashStart;
  for (size_t place = 0; place < pool_.size(); ++place)
    pool_[place] = hash(place < words.size() ? words[place] : 0, constant, kHashFactor);
  for (size_t source = 0; source < pool_.size(); ++source) {
    for (size_t target = 0; target < pool_.size(); ++target)
      if (source != target) pool_[target] = mix(pool_[target], hash(pool_[source], constant, kHashFactor));
  }
  for (size_t place = pool_.size(); place < words.size(); ++place)
    for (uint32_t& target : pool_) target = mix(target, hash(words[place], constant, kHashFactor));
}

std::vector<uint32_t> SeedSequence::generate(size_t count) const {
  std::vector<uint32_t> state(count);
  uint32_t constant = kStateStart;
  for (size_t place = 0; place < count; ++place)
    state[place] = hash(pool_[place % pool_.size()], constant, kStateFactor);
  return state;
}

}  // namespace penstock
