// SPDX-License-Identifier: Apache-2.0
#pragma once
// SHA-256 (FIPS 180-4) by OpenSSL, for keys: a value that is found under a key is used without further checks, so a
// collision would give a wrong result, and the hash must resist both accidental and deliberate collisions.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

struct evp_md_ctx_st;

namespace penstock::graph {

// Thread-compatible. Throws AssertionFailure if OpenSSL has no SHA-256, or no memory.
class Sha256 {
 public:
  Sha256();

  void update(std::span<const std::byte> bytes);
  void update(std::string_view text) { update(std::as_bytes(std::span(text.data(), text.size()))); }

  // Ends the message. The object must not be used afterwards, unless by restart().
  std::array<uint8_t, 32> finish();

  // Begins another message.
  void restart();

 private:
  struct Free {
    void operator()(evp_md_ctx_st* context) const;
  };

  std::unique_ptr<evp_md_ctx_st, Free> context_;
};

// The first 128 bits of the digest as 32 hex digits: the form of keys and digests. Ends the message.
std::string short_digest(Sha256& hash);

}  // namespace penstock::graph
