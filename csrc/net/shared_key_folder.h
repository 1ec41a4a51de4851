// SPDX-License-Identifier: Apache-2.0
#pragma once
// The keys that the processes of one user share on one machine when none were given, so that CURVE and roles are on all
// the same. They are made by the first process that needs them, in a folder that only this user can enter. They are
// good on loopback alone (KeyOrigin::kShared): other machines have no copy, and no one has decided that they should.

#include <optional>
#include <string>

#include "base/result.h"
#include "net/key_ring.h"

namespace penstock::net {

// Where the folder may lie.
struct SharedKeyPlaces {
  std::string runtime_folder;  // of this user, 0700, gone when the user logs out; empty when there is none
  std::string temp_folder;     // of everybody

  // $XDG_RUNTIME_DIR, and $TMPDIR or else /tmp.
  static SharedKeyPlaces from_environment();
};

// The path of the folder: `penstock` below the runtime folder or, without that, `penstock-UID` below the temporary
// folder. It is made with its keys if it is not there; of several processes that do so at once, one succeeds and all
// use its keys. A folder of another user, with a looser mode, or behind a symbolic link is refused.
Result<std::string> shared_key_folder(const SharedKeyPlaces& places = SharedKeyPlaces::from_environment());

// The keys of that folder for a process of `own_role`.
Result<KeyRing> load_shared_keys(Role own_role, const SharedKeyPlaces& places = SharedKeyPlaces::from_environment());

// The keys in `folder`, as load_key_folder() has them; without a folder the shared ones.
Result<KeyRing> load_keys(const std::optional<std::string>& folder, Role own_role);

}  // namespace penstock::net
