// SPDX-License-Identifier: Apache-2.0
#pragma once
// The keys of one process of a pool: its own pair, the public keys of every role, and the individual keys of users and
// machines. A peer is identified by its key; its claims are ignored.

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "net/keys.h"

namespace penstock::net {

// The origin of the keys. Shared keys were created by this user's processes on this machine, for this machine only.
enum class KeyOrigin : uint8_t { kGiven, kShared };

// The name of the user or the machine that holds each key.
using KeyNames = std::map<PublicKey, std::string>;
using RoleKeys = std::array<PublicKey, kRoles.size()>;  // in the order of kRoles
using FormerKeys = std::array<std::optional<PublicKey>, kRoles.size()>;

// Thread-compatible.
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
  bool lets_in(const PublicKey& key, Role role) const {
    const std::vector<PublicKey> keys = generations(role);
    return std::find(keys.begin(), keys.end(), key) != keys.end() || named(role).contains(key);
  }

  friend bool operator==(const PublicKeys&, const PublicKeys&) = default;
};

// Thread-compatible.
class KeyRing {
 public:
  // `keys` admit the holder of `own` as `own_role`. `folder` is the folder from which they were read, if the public
  // ones are to be reread while the process runs.
  KeyRing(Role own_role, KeyPair own, PublicKeys keys, KeyOrigin origin, std::string folder = {})
      : own_role_(own_role), own_(std::move(own)), keys_(std::move(keys)), origin_(origin), folder_(std::move(folder)) {
    PENSTOCK_ASSERT(keys_.lets_in(own_.public_key(), own_role_));
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

}  // namespace penstock::net
