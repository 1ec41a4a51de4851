// SPDX-License-Identifier: Apache-2.0
#pragma once
// A digest that detects changes of content, computed in the pass that copies it: on x86-64, at the speed of the copy
// alone if the content is in no cache. Not for content that an adversary chooses.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace penstock {

// Stripes of eight words are added to eight lanes, as XXH3 (https://github.com/Cyan4973/xxHash) does: a word's lane
// gets the product of its two halves, which a key of the stripe's place has changed, and the neighbouring lane gets the
// word itself. A block of stripes ends with an invertible mixture of each lane. So a single differing word always
// changes the digest; several differing words yield the same one only by chance (2^-64).
//
// ContentDigest (bytes.h) is as certain and takes words one by one, at the time of a second copy. Its values are in
// files and messages.
//
// Thread-compatible.
class CopyDigest {
 public:
  using Value = std::array<uint64_t, 4>;

  // Adds the bytes and their number, so that the boundary between two neighbours counts.
  void add(std::span<const std::byte> bytes);

  // The same, and copies the bytes. The digest is that of the copy: `bytes` may change meanwhile.
  void copy(std::span<const std::byte> bytes, std::byte* to);

  Value value() const;

 private:
  static constexpr size_t kLaneCount = 8;

  std::array<uint64_t, kLaneCount> lanes_ = {0x243f6a8885a308d3, 0x13198a2e03707344, 0xa4093822299f31d0,
                                             0x082efa98ec4e6c89, 0x452821e638d01377, 0xbe5466cf34e90c6c,
                                             0xc0ac29b7c97c50dd, 0x3f84d5b5b5470917};
};

}  // namespace penstock
