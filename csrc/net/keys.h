// SPDX-License-Identifier: Apache-2.0
#pragma once
// The CURVE keys of a pool: a public key, a key pair with its secret, the roles of keys, the ids of runs that are
// derived from them, and the key ring of one process. A public key is a name that can be shown to anyone. A secret key
// is wiped when it is destroyed, is never copied, and is only converted to text for its file: no code here can print
// it.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"
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

// A hash that only the holders of the secret can compute: a proof to each other that they hold it. `context` tells
// apart what it is used for.
constexpr size_t kKeyedHashBytes = 32;
using KeyedHash = std::array<std::byte, kKeyedHashBytes>;
KeyedHash keyed_hash(std::span<const std::byte, kKeyBytes> secret, std::string_view context,
                     std::span<const std::byte> bytes);

// The origin of the keys. Shared keys were created by this user's processes on this machine, for this machine only.
enum class KeyOrigin : uint8_t { kGiven, kShared };

// The name of the user or the machine that holds each key.
using KeyNames = std::map<PublicKey, std::string>;
using RoleKeys = std::array<PublicKey, kRoles.size()>;  // in the order of kRoles
using FormerKeys = std::array<std::optional<PublicKey>, kRoles.size()>;

// The public keys of every role, and the individual keys of users and machines. A peer is identified by its key; its
// claims are ignored. Thread-compatible.
struct PublicKeys {
  RoleKeys roles{};
  FormerKeys former{};  // of the previous generation, until its rotation is finished; as valid as `roles`
  KeyNames users{};     // of trainers, in addition to the keys of the role
  KeyNames machines{};  // of workers, in addition to the keys of the role

  // The keys of all holders of the role's secret: the newest one, followed by the former one if it is still valid.
  std::vector<PublicKey> generations(Role role) const {
    const auto place = static_cast<size_t>(role);
    std::vector<PublicKey> keys{roles[place]};
    if (former[place]) keys.push_back(*former[place]);
    return keys;
  }
  // The individual keys of holders that act in the role.
  KeyNames named(Role role) const {
    return role == Role::kTrainer ? users : role == Role::kWorker ? machines : KeyNames();
  }
  // Whether the holder of this key may act in the role.
  bool admits(const PublicKey& key, Role role) const {
    const std::vector<PublicKey> keys = generations(role);
    return std::find(keys.begin(), keys.end(), key) != keys.end() || named(role).contains(key);
  }

  friend bool operator==(const PublicKeys&, const PublicKeys&) = default;
};

// The keys of one process of a pool: its own pair, and the public keys. Thread-compatible.
class KeyRing {
 public:
  // `keys` admit the holder of `own` as `own_role`. `folder` is the folder from which they were read, if the public
  // ones are to be reread while the process runs.
  KeyRing(Role own_role, KeyPair own, PublicKeys keys, KeyOrigin origin, std::string folder = {})
      : own_role_(own_role), own_(std::move(own)), keys_(std::move(keys)), origin_(origin), folder_(std::move(folder)) {
    PENSTOCK_ASSERT(keys_.admits(own_.public_key(), own_role_));
  }

  Role own_role() const { return own_role_; }
  const KeyPair& own() const { return own_; }
  KeyOrigin origin() const { return origin_; }

  const PublicKeys& public_keys() const { return keys_; }
  const PublicKey& public_key(Role role) const { return keys_.roles[static_cast<size_t>(role)]; }
  const PublicKey& controller_key() const { return public_key(Role::kController); }
  const KeyNames& users() const { return keys_.users; }
  // The folder's absolute path; empty if there is none.
  const std::string& folder() const { return folder_; }

 private:
  Role own_role_;
  KeyPair own_;
  PublicKeys keys_;
  KeyOrigin origin_;
  std::string folder_;
};

// Z85, ZeroMQ's text encoding of keys: every four bytes, read as one big-endian number, become five digits of base 85.
// The length of `bytes` is a multiple of four, and `text` has room for the digits.
void encode_z85(std::span<const std::byte> bytes, std::span<char> text);

// Returns false, with `bytes` in any state, unless `text` consists of exactly the digits for the size of `bytes`.
// libzmq's decoder accepts digits whose number does not fit into 32 bits; this one rejects them, so a key has exactly
// one text.
[[nodiscard]] bool try_decode_z85(std::string_view text, std::span<std::byte> bytes);

}  // namespace penstock::net
