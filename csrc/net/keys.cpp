// SPDX-License-Identifier: Apache-2.0
#include "net/keys.h"

#include <sodium.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "base/result.h"

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

KeyedHash keyed_hash(std::span<const std::byte, kKeyBytes> secret, std::string_view context,
                     std::span<const std::byte> bytes) {
  KeyedHash hash{};
  const uint64_t context_bytes = context.size();
  crypto_generichash_state state;
  crypto_generichash_init(&state, key_place(secret.data()), secret.size(), hash.size());
  crypto_generichash_update(&state, key_place(std::as_bytes(std::span(&context_bytes, 1)).data()),
                            sizeof context_bytes);
  crypto_generichash_update(&state, key_place(context.data()), context.size());
  crypto_generichash_update(&state, key_place(bytes.data()), bytes.size());
  crypto_generichash_final(&state, key_place(hash.data()), hash.size());
  wipe(std::as_writable_bytes(std::span(&state, 1)));
  return hash;
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

namespace {

constexpr std::string_view kDigits =
    "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#";
constexpr uint64_t kBase = 85;
static_assert(kDigits.size() == kBase);
constexpr uint8_t kNoDigit = 0xff;

constexpr std::array<uint8_t, 256> kValues = [] {
  std::array<uint8_t, 256> values{};
  values.fill(kNoDigit);
  for (size_t value = 0; value < kDigits.size(); ++value) {
    values[static_cast<uint8_t>(kDigits[value])] = static_cast<uint8_t>(value);
  }
  return values;
}();

}  // namespace

void encode_z85(std::span<const std::byte> bytes, std::span<char> text) {
  PENSTOCK_ASSERT(bytes.size() % 4 == 0 && text.size() == bytes.size() / 4 * 5, "Z85 of ", bytes.size(), " bytes");
  for (size_t group = 0; group < bytes.size() / 4; ++group) {
    uint32_t number = 0;
    for (const std::byte byte : bytes.subspan(group * 4, 4)) number = number << 8 | static_cast<uint32_t>(byte);
    for (size_t place = 5; place-- > 0; number /= kBase) text[group * 5 + place] = kDigits[number % kBase];
  }
}

bool try_decode_z85(std::string_view text, std::span<std::byte> bytes) {
  if (bytes.size() % 4 != 0 || text.size() != bytes.size() / 4 * 5) return false;
  for (size_t group = 0; group < bytes.size() / 4; ++group) {
    uint64_t number = 0;
    for (const char digit : text.substr(group * 5, 5)) {
      const uint8_t value = kValues[static_cast<uint8_t>(digit)];
      if (value == kNoDigit) return false;
      number = number * kBase + value;
    }
    if (number > std::numeric_limits<uint32_t>::max()) return false;
    for (size_t place = 4; place-- > 0; number >>= 8) bytes[group * 4 + place] = static_cast<std::byte>(number & 0xff);
  }
  return true;
}

}  // namespace penstock::net
