// SPDX-License-Identifier: Apache-2.0
#pragma once
// SHA-256 (FIPS 180-4), for keys: a value that is found under a key is used without further checks, so a collision
// would give a wrong result, and the hash must resist both accidental and deliberate collisions.

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace penstock::graph {

// Thread-compatible.
class Sha256 {
 public:
  void update(std::span<const std::byte> bytes);
  void update(std::string_view text) { update(std::as_bytes(std::span(text.data(), text.size()))); }

  // Ends the message. The object must not be used afterwards.
  std::array<uint8_t, 32> finish();

 private:
  void compress(const uint8_t* block);

  std::array<uint32_t, 8> state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                    0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> block_{};
  size_t block_bytes_ = 0;
  uint64_t message_bytes_ = 0;
};

// The first 128 bits as 32 hex digits: the form of keys and digests.
std::string short_digest(Sha256 hash);

}  // namespace penstock::graph
