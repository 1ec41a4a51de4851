// SPDX-License-Identifier: Apache-2.0
#include "net/keys.h"

#include <sodium.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "net/z85.h"

namespace penstock::net {
namespace {

static_assert(kKeyBytes == crypto_box_PUBLICKEYBYTES);
static_assert(kKeyBytes == crypto_box_SECRETKEYBYTES);
static_assert(kKeyTextLength == kKeyBytes / 4 * 5);

constexpr std::string_view kRunIdContext = "penstock run 1";

constexpr std::array<std::string_view, kRoles.size()> kRoleNames = {"controller", "trainer", "worker", "operator"};

Fault not_a_key(std::string_view text) {
  return {Errc::kMalformed, "reading a key failed: it has " + std::to_string(text.size()) +
                                " characters or is not Z85; a key must have " + std::to_string(kKeyTextLength) +
                                " Z85 characters; create keys with penstock keys"};
}

unsigned char* key_place(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
const unsigned char* key_place(const void* bytes) { return static_cast<const unsigned char*>(bytes); }

}  // namespace

std::string_view role_name(Role role) { return kRoleNames[static_cast<size_t>(role)]; }

std::optional<Role> find_role(std::string_view name) {
  const auto found = std::find(kRoleNames.begin(), kRoleNames.end(), name);
  if (found == kRoleNames.end()) return std::nullopt;
  return kRoles[static_cast<size_t>(found - kRoleNames.begin())];
}

PublicKey::PublicKey(std::span<const std::byte, kKeyBytes> bytes) {
  std::copy(bytes.begin(), bytes.end(), bytes_.begin());
}

Result<PublicKey> PublicKey::parse(std::string_view text) {
  std::array<std::byte, kKeyBytes> bytes{};
  if (!try_decode_z85(text, bytes)) return not_a_key(text);
  return PublicKey(bytes);
}

std::string PublicKey::text() const {
  std::string text(kKeyTextLength, '\0');
  encode_z85(bytes_, text);
  return text;
}

KeyPair KeyPair::generate() {
  PENSTOCK_ASSERT(sodium_init() >= 0, "libsodium could not be started");
  SecretKey secret_key;
  std::array<std::byte, kKeyBytes> public_key{};
  PENSTOCK_ASSERT(crypto_box_keypair(key_place(public_key.data()), key_place(secret_key.bytes().data())) == 0);
  return {std::move(secret_key), PublicKey(public_key)};
}

KeyPair KeyPair::from_secret(SecretKey secret_key) {
  PENSTOCK_ASSERT(sodium_init() >= 0, "libsodium could not be started");
  std::array<std::byte, kKeyBytes> public_key{};
  PENSTOCK_ASSERT(crypto_scalarmult_base(key_place(public_key.data()), key_place(secret_key.bytes().data())) == 0);
  return {std::move(secret_key), PublicKey(public_key)};
}

Result<KeyPair> KeyPair::parse_secret(std::string_view text) {
  SecretKey secret_key;
  if (!try_decode_z85(text, secret_key.bytes())) return not_a_key(text);
  return from_secret(std::move(secret_key));
}

SecretText KeyPair::secret_text() const {
  SecretText text;
  encode_z85(secret_key_.bytes(), text.characters());
  return text;
}

uint64_t run_id_of(const PublicKey& key, const wire::RunSecret& secret) {
  std::array<unsigned char, crypto_hash_sha256_BYTES> digest{};
  crypto_hash_sha256_state state;
  crypto_hash_sha256_init(&state);
  crypto_hash_sha256_update(&state, key_place(kRunIdContext.data()), kRunIdContext.size());
  crypto_hash_sha256_update(&state, key_place(key.bytes().data()), kKeyBytes);
  crypto_hash_sha256_update(&state, key_place(secret.data()), secret.size());
  crypto_hash_sha256_final(&state, digest.data());
  uint64_t id = 0;
  std::memcpy(&id, digest.data(), sizeof id);
  return id;
}

RunId draw_run_id(const PublicKey& key) {
  PENSTOCK_ASSERT(sodium_init() >= 0, "libsodium could not be started");
  RunId run;
  while (run.id == 0) {
    randombytes_buf(run.secret.data(), run.secret.size());
    run.id = run_id_of(key, run.secret);
  }
  return run;
}

}  // namespace penstock::net
