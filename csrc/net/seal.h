// SPDX-License-Identifier: Apache-2.0
#pragma once
// The seal on the pieces of a batch: authenticated encryption with associated data, AES-256-GCM (NIST SP 800-38D) or
// ChaCha20-Poly1305 (RFC 8439), by OpenSSL. A link's keys are derived by HKDF-SHA256 (RFC 5869) from 32 random bytes of
// each side, which are exchanged inside the CURVE connection. SECURITY.md has the reasons.

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

// The maximum number of messages under one key. At 2^32 pieces of 2^16 blocks an eavesdropper's advantage over guessing
// is below 2^-30 in the bounds of SP 800-38D and RFC 8439; a link ends before, and the next one has new keys.
constexpr uint64_t kSealedCountMax = uint64_t{1} << 32;

// The ciphers that this machine computes fast: both if it has AES instructions, otherwise only ChaCha20-Poly1305.
uint8_t fast_ciphers();
// The better cipher of the ones that both sides compute fast. ChaCha20-Poly1305 if there is none: each side supports
// it.
wire::SealCipher choose_cipher(uint8_t own, uint8_t offered);

// Draws 32 bytes from the system's generator.
Result<SealNonce> draw_seal_nonce();

// The terms that the two sides of a link have agreed on.
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

// The use of one key in one direction. Confined to one thread at a time.
class Sealer {
 public:
  static Result<Sealer> make(wire::SealCipher cipher, const SealKey& key);

  // Seals `plain` into `sealed`, which is kSealTagBytes longer, and authenticates `head`. `counter` must be unique per
  // key, from 1 to kSealedCountMax.
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

  // Opens `sealed` into `plain`, which is kSealTagBytes shorter. Returns false if the bytes or the head differ from the
  // ones that were sealed with this counter and key; the contents of `plain` are then meaningless.
  [[nodiscard]] bool open(uint64_t counter, std::span<const std::byte> head, std::span<const std::byte> sealed,
                          std::span<std::byte> plain);

 private:
  using Context = std::unique_ptr<evp_cipher_ctx_st, void (*)(evp_cipher_ctx_st*)>;
  explicit Opener(Context context) : context_(std::move(context)) {}

  Context context_;
};

}  // namespace penstock::net
