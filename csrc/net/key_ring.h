// SPDX-License-Identifier: Apache-2.0
#pragma once
// The keys of one process of a pool: its own pair, the public keys of every role, and those of users and machines with
// keys of their own. A key says who a peer is; the peer's own claims count for nothing.

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "net/keys.h"

namespace penstock::net {

// Where the keys come from. Shared ones were made by this user's own processes on this machine, for this machine alone.
enum class KeyOrigin : uint8_t { kGiven, kShared };

// By key, the name of the user or the machine that has it.
using KeyNames = std::map<PublicKey, std::string>;
using RoleKeys = std::array<PublicKey, kRoles.size()>;  // in the order of kRoles
using FormerKeys = std::array<std::optional<PublicKey>, kRoles.size()>;

// Thread-compatible.
struct PublicKeys {
  RoleKeys roles{};
  FormerKeys former{};  // of the generation before, until its rotation is finished; they count as those of `roles` do
  KeyNames users{};     // of trainers beside those of the role
  KeyNames machines{};  // of workers beside those of the role

  // The keys of all holders of the role's secret: the newest one, and behind it the former one if it still counts.
  std::vector<PublicKey> generations(Role role) const {
    const auto place = static_cast<size_t>(role);
    std::vector<PublicKey> keys{roles[place]};
    if (former[place]) keys.push_back(*former[place]);
    return keys;
  }
  // Those who act in the role with keys of their own.
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
  // `keys` let the holder of `own` in as `own_role`. `folder` is where they were read, if the public ones are to be
  // read there again while the process runs.
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
  // The folder's absolute path, or nothing.
  const std::string& folder() const { return folder_; }

 private:
  Role own_role_;
  KeyPair own_;
  PublicKeys keys_;
  KeyOrigin origin_;
  std::string folder_;
};

}  // namespace penstock::net
