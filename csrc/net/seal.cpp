// SPDX-License-Identifier: Apache-2.0
#include "net/seal.h"

#include <openssl/core_names.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <openssl/rand.h>

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include <cstring>
#include <string>
#include <utility>

namespace penstock::net {
namespace {

using wire::SealCipher;

static_assert(OPENSSL_VERSION_MAJOR >= 3, "encryption requires OpenSSL 3 or later");

constexpr size_t kIvBytes = 12;
using Iv = std::array<unsigned char, kIvBytes>;
using Context = std::unique_ptr<EVP_CIPHER_CTX, void (*)(EVP_CIPHER_CTX*)>;

// Each key is used for one direction of one link, so the counter alone makes its nonces unique.
Iv iv_of(uint64_t counter) {
  Iv iv{};
  for (size_t place = 0; place < 8; ++place)
    iv[kIvBytes - 1 - place] = static_cast<unsigned char>(counter >> (8 * place));
  return iv;
}

Fault openssl_failure(const std::string& what) {
  char reason[256] = "unknown reason";
  if (const unsigned long code = ERR_get_error(); code != 0) ERR_error_string_n(code, reason, sizeof reason);
  ERR_clear_error();
  return {Errc::kFailed, what + " failed in OpenSSL: " + reason};
}

const unsigned char* place(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }
unsigned char* place(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }

Result<Context> make_context(SealCipher cipher, const SealKey& key, int is_sealing) {
  Context context(EVP_CIPHER_CTX_new(), &EVP_CIPHER_CTX_free);
  const EVP_CIPHER* kind = cipher == SealCipher::kAes256Gcm ? EVP_aes_256_gcm() : EVP_chacha20_poly1305();
  if (!context || EVP_CipherInit_ex(context.get(), kind, nullptr, place(key.bytes().data()), nullptr, is_sealing) != 1)
    return openssl_failure("setting up the encryption of a data connection");
  return context;
}

// Initialises `context` for one message: its nonce, and the head that the seal also authenticates.
bool begin_message(EVP_CIPHER_CTX* context, uint64_t counter, std::span<const std::byte> head, int is_sealing) {
  const Iv iv = iv_of(counter);
  int length = 0;
  return EVP_CipherInit_ex(context, nullptr, nullptr, nullptr, iv.data(), is_sealing) == 1 &&
         EVP_CipherUpdate(context, nullptr, &length, place(head.data()), static_cast<int>(head.size())) == 1;
}

Result<void> derive(std::span<const std::byte> secret, const std::string& label, std::span<std::byte> out) {
  static constexpr std::string_view kSalt = "penstock pieces 1";
  const std::unique_ptr<EVP_KDF, void (*)(EVP_KDF*)> kdf(EVP_KDF_fetch(nullptr, "HKDF", nullptr), &EVP_KDF_free);
  if (!kdf) return openssl_failure("deriving a key");
  const std::unique_ptr<EVP_KDF_CTX, void (*)(EVP_KDF_CTX*)> context(EVP_KDF_CTX_new(kdf.get()), &EVP_KDF_CTX_free);
  if (!context) return openssl_failure("deriving a key");
  // OpenSSL takes parameters that it only reads as non-const.
  char digest[] = "SHA256";
  std::array<OSSL_PARAM, 5> params{
      OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest, 0),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, const_cast<std::byte*>(secret.data()), secret.size()),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_SALT, const_cast<char*>(kSalt.data()), kSalt.size()),
      OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, const_cast<char*>(label.data()), label.size()),
      OSSL_PARAM_construct_end()};
  if (EVP_KDF_derive(context.get(), place(out.data()), out.size(), params.data()) != 1)
    return openssl_failure("deriving a key");
  return {};
}

std::string hexadecimal(std::span<const std::byte> bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : bytes) {
    text += kDigits[static_cast<uint8_t>(byte) >> 4];
    text += kDigits[static_cast<uint8_t>(byte) & 15];
  }
  return text;
}

bool has_aes_instructions() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
  constexpr unsigned long kAesAndPmull = (1ul << 3) | (1ul << 4);  // HWCAP_AES, HWCAP_PMULL
  return (getauxval(AT_HWCAP) & kAesAndPmull) == kAesAndPmull;
#else
  return false;
#endif
}

}  // namespace

uint8_t fast_ciphers() {
  return has_aes_instructions() ? wire::kSealCiphers : wire::cipher_bit(SealCipher::kChaCha20Poly1305);
}

SealCipher choose_cipher(uint8_t own, uint8_t offered) {
  const bool is_aes_fast = (own & offered & wire::cipher_bit(SealCipher::kAes256Gcm)) != 0;
  return is_aes_fast ? SealCipher::kAes256Gcm : SealCipher::kChaCha20Poly1305;
}

Result<SealNonce> draw_seal_nonce() {
  SealNonce nonce{};
  if (RAND_bytes(place(nonce.data()), static_cast<int>(nonce.size())) != 1)
    return openssl_failure("generating random bytes for a key");
  return nonce;
}

Result<SealTerms> agree(SealCipher cipher, const SealNonce& trainers, const SealNonce& workers, const LinkName& name) {
  Wiped<2 * wire::kSealNonceBytes> secret;
  std::memcpy(secret.bytes().data(), trainers.data(), trainers.size());
  std::memcpy(secret.bytes().data() + trainers.size(), workers.data(), workers.size());
  const std::string about = " cipher " + std::to_string(static_cast<int>(cipher)) + " trainer " +
                            std::to_string(name.trainer_id) + " worker " + std::to_string(name.worker_id) + " link " +
                            std::to_string(name.link);
  SealTerms terms{.cipher = cipher};
  Wiped<32> ticket;
  const std::pair<const char*, std::span<std::byte>> parts[] = {
      {"to trainer", terms.to_trainer.bytes()}, {"to worker", terms.to_worker.bytes()}, {"ticket", ticket.bytes()}};
  for (const auto& [label, out] : parts) {
    if (auto derived = derive(secret.bytes(), label + about, out); !derived) return derived.error();
  }
  terms.ticket = Ticket(hexadecimal(ticket.bytes()));
  return terms;
}

Result<Sealer> Sealer::make(SealCipher cipher, const SealKey& key) {
  auto context = make_context(cipher, key, 1);
  if (!context) return context.error();
  return Sealer(std::move(context).value());
}

Result<void> Sealer::seal(uint64_t counter, std::span<const std::byte> head, std::span<const std::byte> plain,
                          std::span<std::byte> sealed) {
  PENSTOCK_ASSERT(counter > 0 && counter <= kSealedCountMax, "a nonce would repeat");
  PENSTOCK_ASSERT(sealed.size() == plain.size() + wire::kSealTagBytes);
  int length = 0;
  // An update without bytes would finish the message.
  if (!begin_message(context_.get(), counter, head, 1) ||
      (!plain.empty() && EVP_EncryptUpdate(context_.get(), place(sealed.data()), &length, place(plain.data()),
                                           static_cast<int>(plain.size())) != 1) ||
      EVP_EncryptFinal_ex(context_.get(), place(sealed.data()) + plain.size(), &length) != 1 ||
      EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_GET_TAG, wire::kSealTagBytes, sealed.data() + plain.size()) !=
          1) {
    return openssl_failure("encrypting a chunk of a batch");
  }
  return {};
}

Result<Opener> Opener::make(SealCipher cipher, const SealKey& key) {
  auto context = make_context(cipher, key, 0);
  if (!context) return context.error();
  return Opener(std::move(context).value());
}

bool Opener::open(uint64_t counter, std::span<const std::byte> head, std::span<const std::byte> sealed,
                  std::span<std::byte> plain) {
  PENSTOCK_ASSERT(sealed.size() == plain.size() + wire::kSealTagBytes);
  std::array<std::byte, wire::kSealTagBytes> tag{};
  std::memcpy(tag.data(), sealed.data() + plain.size(), tag.size());
  int length = 0;
  const bool is_good =
      begin_message(context_.get(), counter, head, 0) &&
      (plain.empty() || EVP_DecryptUpdate(context_.get(), place(plain.data()), &length, place(sealed.data()),
                                          static_cast<int>(plain.size())) == 1) &&
      EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_AEAD_SET_TAG, wire::kSealTagBytes, tag.data()) == 1 &&
      EVP_DecryptFinal_ex(context_.get(), place(plain.data()) + plain.size(), &length) == 1;
  if (!is_good) ERR_clear_error();
  return is_good;
}

}  // namespace penstock::net
