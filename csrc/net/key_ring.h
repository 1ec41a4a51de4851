// SPDX-License-Identifier: Apache-2.0
#pragma once
// The keys of one process of a pool: the pair of its own role, and the public key of every role. A key says who a peer
// is; the peer's own claims count for nothing.

#include <array>
#include <optional>
#include <utility>

#include "net/keys.h"

namespace penstock::net {

// Where the keys come from. Shared ones were made by this user's own processes on this machine, for this machine alone.
enum class KeyOrigin : uint8_t { kGiven, kShared };

using RoleKeys = std::array<PublicKey, kRoles.size()>;  // in the order of kRoles

// Thread-compatible.
class KeyRing {
 public:
  // The public key of `own` is the one that `keys` has for `own_role`, and no two roles have the same.
  KeyRing(Role own_role, KeyPair own, const RoleKeys& keys, KeyOrigin origin)
      : own_role_(own_role), own_(std::move(own)), keys_(keys), origin_(origin) {
    PENSTOCK_ASSERT(own_.public_key() == public_key(own_role_));
  }

  Role own_role() const { return own_role_; }
  const KeyPair& own() const { return own_; }
  KeyOrigin origin() const { return origin_; }

  const PublicKey& public_key(Role role) const { return keys_[static_cast<size_t>(role)]; }
  const PublicKey& controller_key() const { return public_key(Role::kController); }

  // The role that a key stands for; none if the key is not of this pool.
  std::optional<Role> role_of(const PublicKey& key) const {
    for (const Role role : kRoles) {
      if (public_key(role) == key) return role;
    }
    return std::nullopt;
  }

 private:
  Role own_role_;
  KeyPair own_;
  RoleKeys keys_;
  KeyOrigin origin_;
};

}  // namespace penstock::net
