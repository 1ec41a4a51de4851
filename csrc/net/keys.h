// SPDX-License-Identifier: Apache-2.0
#pragma once
// CURVE keys, their roles, and the ids of runs that are derived from them. A public key is a name that can be shown to
// anyone. A secret key is wiped when it is destroyed, is never copied, and is only converted to text for its file: no
// code here can print it.

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "base/result.h"
#include "base/wiped.h"
#include "wire/reports.h"

namespace penstock::net {

constexpr size_t kKeyBytes = wire::kPublicKeyBytes;
constexpr size_t kKeyTextLength = 40;  // in Z85

// The roles that the holder of a key may have in a pool.
enum class Role : uint8_t { kController, kTrainer, kWorker, kOperator };
constexpr std::array<Role, 4> kRoles = {Role::kController, Role::kTrainer, Role::kWorker, Role::kOperator};

// As in file names and messages: "controller", "trainer", "worker", "operator".
std::string_view role_name(Role role);
std::optional<Role> find_role(std::string_view name);

// Thread-compatible.
class PublicKey {
 public:
  PublicKey() = default;  // all zeros, which is no holder's key
  explicit PublicKey(std::span<const std::byte, kKeyBytes> bytes);

  // Reads Z85. The error message does not repeat the text, which may be a misplaced secret.
  static Result<PublicKey> parse(std::string_view text);

  std::span<const std::byte, kKeyBytes> bytes() const { return bytes_; }
  std::string text() const;

  friend bool operator==(const PublicKey&, const PublicKey&) = default;
  friend bool operator<(const PublicKey& one, const PublicKey& other) { return one.bytes_ < other.bytes_; }

 private:
  std::array<std::byte, kKeyBytes> bytes_{};
};

// Bytes that are wiped when they are destroyed or moved from, and that cannot be copied. Thread-compatible.
template <size_t kSize>
class Wiped {
 public:
  Wiped() = default;
  Wiped(Wiped&& other) noexcept : bytes_(other.bytes_) { wipe(other.bytes_); }
  Wiped& operator=(Wiped&&) = delete;

  std::span<std::byte, kSize> bytes() { return bytes_; }
  std::span<const std::byte, kSize> bytes() const { return bytes_; }

  // The bytes as characters.
  std::span<char> characters() { return {reinterpret_cast<char*>(bytes_.data()), kSize}; }
  std::string_view text() const { return {reinterpret_cast<const char*>(bytes_.data()), kSize}; }

 private:
  WipedArray<kSize> bytes_{};
};

using SecretKey = Wiped<kKeyBytes>;
using SecretText = Wiped<kKeyTextLength>;

// A secret key and its public key. Thread-compatible.
class KeyPair {
 public:
  static KeyPair generate();

  // The pair of a secret, from which the public key is derived.
  static KeyPair from_secret(SecretKey secret_key);

  // Reads the text that `secret_text` wrote. The error message does not repeat the text.
  static Result<KeyPair> parse_secret(std::string_view text);

  KeyPair(KeyPair&&) = default;

  const PublicKey& public_key() const { return public_key_; }
  const SecretKey& secret_key() const { return secret_key_; }

  // For the secret's file only.
  SecretText secret_text() const;

 private:
  KeyPair(SecretKey secret_key, const PublicKey& public_key)
      : secret_key_(std::move(secret_key)), public_key_(public_key) {}

  SecretKey secret_key_;
  PublicKey public_key_;
};

// The id of one run of a trainer or a worker, and the secret that proves its ownership. The id is a hash of the run's
// key and the secret: a server that receives an id recomputes it from the connection's key and the secret sent along
// with it, and so identifies the owner without remembering anything.
struct RunId {
  uint64_t id = 0;
  wire::RunSecret secret{};
};

// The id of a process with this key that has drawn this secret. 0 is no process's id.
uint64_t run_id_of(const PublicKey& key, const wire::RunSecret& secret);
// Draws the id of a new run.
RunId draw_run_id(const PublicKey& key);

}  // namespace penstock::net
