// SPDX-License-Identifier: Apache-2.0
#pragma once
// The keys of one process of a pool: the pair of its own role, the public key of every role, and those of users who
// train with keys of their own. A key says who a peer is; the peer's own claims count for nothing.

#include <array>
#include <map>
#include <string>
#include <utility>

#include "net/keys.h"

namespace penstock::net {

// Where the keys come from. Shared ones were made by this user's own processes on this machine, for this machine alone.
enum class KeyOrigin : uint8_t { kGiven, kShared };

// By key, the user's name.
using UserKeys = std::map<PublicKey, std::string>;
using RoleKeys = std::array<PublicKey, kRoles.size()>;  // in the order of kRoles
struct PublicKeys {
  RoleKeys roles{};
  UserKeys users{};  // of trainers beside that of the role

  friend bool operator==(const PublicKeys&, const PublicKeys&) = default;
};

// Thread-compatible.
class KeyRing {
 public:
  // The public key of `own` is the one that `keys` has for `own_role`, and no two roles have the same.
  // `folder` is where they were read, if servers are to read the public ones there again while they run.
  KeyRing(Role own_role, KeyPair own, const RoleKeys& keys, KeyOrigin origin, UserKeys users = {},
          std::string folder = {})
      : own_role_(own_role),
        own_(std::move(own)),
        keys_{.roles = keys, .users = std::move(users)},
        origin_(origin),
        folder_(std::move(folder)) {
    PENSTOCK_ASSERT(own_.public_key() == public_key(own_role_));
  }

  Role own_role() const { return own_role_; }
  const KeyPair& own() const { return own_; }
  KeyOrigin origin() const { return origin_; }

  const PublicKeys& public_keys() const { return keys_; }
  const PublicKey& public_key(Role role) const { return keys_.roles[static_cast<size_t>(role)]; }
  const PublicKey& controller_key() const { return public_key(Role::kController); }

  const UserKeys& users() const { return keys_.users; }
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
