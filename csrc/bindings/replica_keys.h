// SPDX-License-Identifier: Apache-2.0
#pragma once
// The keys of one rank for the other ranks of its replica group, for this run only.

#include <string>
#include <utility>

#include "base/result.h"
#include "net/key_ring.h"
#include "net/keys.h"

namespace penstock::bindings {

// Thread-compatible.
class ReplicaKeys {
 public:
  ReplicaKeys() : pair_(net::KeyPair::generate()) {}

  std::string public_key() const { return pair_.public_key().text(); }
  Result<net::KeyPair> copy() const { return net::KeyPair::parse_secret(pair_.secret_text().text()); }

  // The key ring of a follower: `leader` is the worker that it knows.
  Result<net::KeyRing> ring_towards(const net::PublicKey& leader) const {
    auto own = copy();
    if (!own) return own.error();
    net::PublicKeys keys{.roles = {net::KeyPair::generate().public_key(), pair_.public_key(), leader,
                                   net::KeyPair::generate().public_key()}};
    return net::KeyRing(net::Role::kTrainer, std::move(own).value(), std::move(keys), net::KeyOrigin::kGiven);
  }

 private:
  net::KeyPair pair_;
};

}  // namespace penstock::bindings
