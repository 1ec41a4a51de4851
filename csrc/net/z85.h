// SPDX-License-Identifier: Apache-2.0
#pragma once
// Z85, ZeroMQ's text encoding of keys: every four bytes, read as one big-endian number, become five digits of base 85.
// libzmq's decoder accepts digits whose number does not fit into 32 bits; this one rejects them, so a key has exactly
// one text.

#include <cstddef>
#include <span>
#include <string_view>

namespace penstock::net {

// Writes five characters for every four bytes. The length of `bytes` is a multiple of four, and `text` has room for the
// digits.
void encode_z85(std::span<const std::byte> bytes, std::span<char> text);

// Returns false, with `bytes` in any state, unless `text` consists of exactly the digits for the size of `bytes`.
[[nodiscard]] bool try_decode_z85(std::string_view text, std::span<std::byte> bytes);

}  // namespace penstock::net
