// SPDX-License-Identifier: Apache-2.0
#pragma once
// The seal on the pieces of a batch: authenticated encryption with associated data, AES-256-GCM (NIST SP 800-38D) or
// ChaCha20-Poly1305 (RFC 8439), by OpenSSL. A link's keys are derived by HKDF-SHA256 (RFC 5869) from 32 random bytes of
// each side, which are exchanged inside the CURVE connection, and with them the ticket by which its trainer is admitted
// to the worker's data port. SECURITY.md has the reasons.

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/mutex.h"
#include "base/result.h"
#include "net/keys.h"
#include "wire/pool_record.h"

struct evp_cipher_ctx_st;

namespace penstock::net {

// The name for a ticket in ZeroMQ's PLAIN, and the User-Id of a client that was admitted by one.
constexpr std::string_view kTicketHolder = "ticket";

// The token that a trainer shows to be admitted where a worker serves the pieces of batches. Each ticket is valid once.
// Wiped when it is destroyed or replaced. Thread-compatible.
class Ticket {
 public:
  // At most 255 characters, since it is sent as PLAIN's password.
  explicit Ticket(std::string text) : text_(std::move(text)) {}
  Ticket(const Ticket&) = default;
  Ticket& operator=(const Ticket& other) {
    Ticket copy(other);
    text_.swap(copy.text_);
    return *this;
  }
  ~Ticket() { wipe(std::as_writable_bytes(std::span(text_))); }

  const std::string& text() const { return text_; }

  // Takes the same time regardless of where the two differ, so that a ticket cannot be guessed character by character.
  bool is(std::string_view shown) const {
    if (shown.size() != text_.size()) return false;
    volatile unsigned char difference = 0;
    for (size_t place = 0; place < text_.size(); ++place)
      difference = difference | static_cast<unsigned char>(shown[place] ^ text_[place]);
    return difference == 0;
  }

 private:
  std::string text_;
};

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

constexpr size_t kSealedBufferCountMax = 4;

// Memory that sealed pieces are written to and stay in until ZeroMQ has sent them. It is reused, so that the system
// does not have to provide new pages for each piece, and small, so that it stays in the processor's caches.
// Thread-safe.
class SealedBuffers {
 public:
  using Buffer = std::unique_ptr<std::byte[]>;  // of kPieceMessageBytesMax bytes

  // `on_room` is called when a buffer is given back while all were taken.
  explicit SealedBuffers(std::function<void()> on_room) : on_room_(std::move(on_room)) {}

  bool has_room() const {
    MutexLock lock(mutex_);
    return out_count_ < kSealedBufferCountMax;
  }

  Buffer take() {
    MutexLock lock(mutex_);
    ++out_count_;
    if (free_.empty()) return std::make_unique_for_overwrite<std::byte[]>(wire::kPieceMessageBytesMax);
    Buffer buffer = std::move(free_.back());
    free_.pop_back();
    return buffer;
  }

  void give_back(Buffer buffer) {
    bool was_full = false;
    {
      MutexLock lock(mutex_);
      was_full = out_count_-- == kSealedBufferCountMax;
      free_.push_back(std::move(buffer));
    }
    if (was_full) on_room_();
  }

 private:
  const std::function<void()> on_room_;
  mutable Mutex mutex_;
  std::vector<Buffer> free_ PENSTOCK_GUARDED_BY(mutex_);
  size_t out_count_ PENSTOCK_GUARDED_BY(mutex_) = 0;
};

}  // namespace penstock::net
