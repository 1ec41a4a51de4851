// SPDX-License-Identifier: Apache-2.0
#pragma once
// A digest that detects changes of content, at memory speed. Not for content that an adversary chooses.
//
// Four lanes take words in turn. A lane mixes in a word by an operation that is invertible in either argument, so a
// single differing word always changes the digest; several differing words yield the same one only by chance (2^-64).

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace penstock {

// Thread-compatible.
class ContentDigest {
 public:
  using Value = std::array<uint64_t, 4>;

  void add(uint64_t word) {
    lanes_[turn_] = mixed(lanes_[turn_], word);
    turn_ = (turn_ + 1) % lanes_.size();
  }

  // Adds the bytes and their number, so that the boundary between two neighbours counts.
  void add(std::span<const std::byte> bytes) {
    add(bytes.size());
    size_t place = 0;
    Value lanes = lanes_;  // in registers
    for (; place + sizeof(Value) <= bytes.size(); place += sizeof(Value)) {
      for (size_t lane = 0; lane < lanes.size(); ++lane)
        lanes[lane] = mixed(lanes[lane], word_at(bytes, place + lane * sizeof(uint64_t)));
    }
    lanes_ = lanes;
    for (; place + sizeof(uint64_t) <= bytes.size(); place += sizeof(uint64_t)) add(word_at(bytes, place));
    if (place == bytes.size()) return;
    uint64_t last = 0;
    std::memcpy(&last, bytes.data() + place, bytes.size() - place);
    add(last);
  }

  const Value& value() const { return lanes_; }

 private:
  static uint64_t mixed(uint64_t lane, uint64_t word) {
    lane = (std::rotl(lane, 29) ^ word) * 0x9e3779b97f4a7c15;
    // After one product the last bit of a word still affects only one bit, which the lane's next word could undo.
    return (lane ^ (lane >> 32)) * 0xbf58476d1ce4e5b9;
  }

  static uint64_t word_at(std::span<const std::byte> bytes, size_t place) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + place, sizeof word);
    return word;
  }

  Value lanes_ = {0x243f6a8885a308d3, 0x13198a2e03707344, 0xa4093822299f31d0, 0x082efa98ec4e6c89};
  size_t turn_ = 0;
};

}  // namespace penstock
