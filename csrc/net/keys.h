// SPDX-License-Identifier: Apache-2.0
#pragma once
// CURVE keys, the roles that they stand for, and the ids of runs that follow from them. A public key is a name that can
// be told to anyone. A secret key is wiped when it is dropped, is never copied, and has no text but the one that goes
// into its file: nothing here can print it.

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
constexpr size_t kKeyTextLength = 40;  // of Z85

// The parts that the holder of a key may play in a pool.
enum class Role : uint8_t { kController, kTrainer, kWorker, kOperator };
constexpr std::array<Role, 4> kRoles = {Role::kController, Role::kTrainer, Role::kWorker, Role::kOperator};

// As in file names and messages: "controller", "trainer", "worker", "operator".
std::string_view role_name(Role role);
std::optional<Role> find_role(std::string_view name);

// Thread-compatible.
class PublicKey {
 public:
  PublicKey() = default;  // all zero, which is nobody's
  explicit PublicKey(std::span<const std::byte, kKeyBytes> bytes);

  // Reads Z85. The message of its error does not repeat the text, which may be a secret in the wrong place.
  static Result<PublicKey> parse(std::string_view text);

  std::span<const std::byte, kKeyBytes> bytes() const { return bytes_; }
  std::string text() const;

  friend bool operator==(const PublicKey&, const PublicKey&) = default;
  friend bool operator<(const PublicKey& one, const PublicKey& other) { return one.bytes_ < other.bytes_; }

 private:
  std::array<std::byte, kKeyBytes> bytes_{};
};

// Bytes that are wiped when they are dropped or moved from, and that are not copied. Thread-compatible.
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

// A secret key and the public key that belongs to it. Thread-compatible.
class KeyPair {
 public:
  static KeyPair generate();

  // The pair of a secret, whose public key follows from it.
  static KeyPair from_secret(SecretKey secret_key);

  // As `generate` and `secret_text` wrote it. The message of its error does not repeat the text.
  static Result<KeyPair> parse_secret(std::string_view text);

  KeyPair(KeyPair&&) = default;

  const PublicKey& public_key() const { return public_key_; }
  const SecretKey& secret_key() const { return secret_key_; }

  // For the file of the secret, and for nothing else.
  SecretText secret_text() const;

 private:
  KeyPair(SecretKey secret_key, const PublicKey& public_key)
      : secret_key_(std::move(secret_key)), public_key_(public_key) {}

  SecretKey secret_key_;
  PublicKey public_key_;
};

// The id of one run of a trainer or a worker, and the secret that shows whose it is. The id is a hash of the key that
// the run shows and of the secret: a server that is told an id computes it anew from the connection's key and the
// secret that came along, and so needs to remember nothing to know its owner.
struct RunId {
  uint64_t id = 0;
  wire::RunSecret secret{};
};

// Of a process with this key, which has drawn this secret. 0 is nobody's.
uint64_t run_id_of(const PublicKey& key, const wire::RunSecret& secret);
// Of a new run.
RunId draw_run_id(const PublicKey& key);

}  // namespace penstock::net
