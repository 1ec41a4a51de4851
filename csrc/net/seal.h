// SPDX-License-Identifier: Apache-2.0
#pragma once
// The seal on the pieces of a batch: authenticated encryption with associated data, AES-256-GCM (NIST SP 800-38D) or
// ChaCha20-Poly1305 (RFC 8439), by OpenSSL. The keys of a link follow by HKDF-SHA256 (RFC 5869) from 32 random bytes of
// each side, which cross inside the CURVE connection. SECURITY.md has the reasons.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "base/result.h"
#include "net/keys.h"
#include "net/ticket.h"
#include "wire/pool_record.h"

struct evp_cipher_ctx_st;

namespace penstock::net {

using SealKey = Wiped<32>;
using SealNonce = wire::SealNonce;

// Messages under one key. At 2^32 pieces of 2^16 blocks an eavesdropper's advantage over guessing is below 2^-30 in the
// bounds of SP 800-38D and RFC 8439; a link ends before, and the next one has other keys.
constexpr uint64_t kSealedCountMax = uint64_t{1} << 32;

// The set of ciphers that this machine computes fast: with instructions for AES both, else ChaCha20-Poly1305 alone.
uint8_t fast_ciphers();
// The better cipher of those that both sides can compute fast. ChaCha20-Poly1305 where there is none: each side can.
wire::SealCipher choose_cipher(uint8_t own, uint8_t offered);

// 32 bytes from the system's generator.
Result<SealNonce> draw_seal_nonce();

// What the two sides of a link have agreed on.
struct SealTerms {
  wire::SealCipher cipher = wire::SealCipher::kAes256Gcm;
  SealKey to_trainer{};
  SealKey to_worker{};
  Ticket ticket{""};
};
struct LinkName {
  uint64_t trainer_id = 0;
  uint64_t worker_id = 0;
  uint32_t link = 0;
};
Result<SealTerms> agree(wire::SealCipher cipher, const SealNonce& trainers, const SealNonce& workers,
                        const LinkName& name);

// One key's use in one direction. Confined to one thread at a time.
class Sealer {
 public:
  static Result<Sealer> make(wire::SealCipher cipher, const SealKey& key);

  // Seals `plain` into `sealed`, which is kSealTagBytes longer, and `head` with it. `counter` must be another one each
  // time, from 1 to kSealedCountMax.
  Result<void> seal(uint64_t counter, std::span<const std::byte> head, std::span<const std::byte> plain,
                    std::span<std::byte> sealed);

 private:
  using Context = std::unique_ptr<evp_cipher_ctx_st, void (*)(evp_cipher_ctx_st*)>;
  explicit Sealer(Context context) : context_(std::move(context)) {}

  Context context_;
};

class Opener {
 public:
  static Result<Opener> make(wire::SealCipher cipher, const SealKey& key);

  // Opens `sealed` into `plain`, which is kSealTagBytes shorter. False if the bytes or the head are not those that were
  // sealed with this counter and key; what is in `plain` then means nothing.
  [[nodiscard]] bool open(uint64_t counter, std::span<const std::byte> head, std::span<const std::byte> sealed,
                          std::span<std::byte> plain);

 private:
  using Context = std::unique_ptr<evp_cipher_ctx_st, void (*)(evp_cipher_ctx_st*)>;
  explicit Opener(Context context) : context_(std::move(context)) {}

  Context context_;
};

}  // namespace penstock::net
