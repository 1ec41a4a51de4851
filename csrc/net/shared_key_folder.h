// SPDX-License-Identifier: Apache-2.0
#pragma once
// The keys that the processes of one user share on one machine if none were given, so that CURVE and roles are always
// enabled. The first process that needs them creates them, in a folder that only this user can enter. They are valid
// only on loopback (KeyOrigin::kShared): other machines have no copy, and no user has decided to give them one.

#include <optional>
#include <string>

#include "base/result.h"
#include "net/key_ring.h"

namespace penstock::net {

// The places where the folder may be.
struct SharedKeyPlaces {
  std::string runtime_folder;  // of this user, 0700, removed when the user logs out; empty if there is none
  std::string temp_folder;     // shared by all users

  // $XDG_RUNTIME_DIR, and $TMPDIR or else /tmp.
  static SharedKeyPlaces from_environment();
};

// The path of the folder: `penstock` in the runtime folder or, without that, `penstock-UID` in the temporary folder. It
// is created with its keys if it does not exist; if several processes do so concurrently, one succeeds and all use its
// keys. A folder of another user, with a looser mode, or behind a symbolic link is rejected.
Result<std::string> shared_key_folder(const SharedKeyPlaces& places = SharedKeyPlaces::from_environment());

// Loads the keys of that folder for a process of `own_role`.
Result<KeyRing> load_shared_keys(Role own_role, const SharedKeyPlaces& places = SharedKeyPlaces::from_environment());

// Loads the keys in `folder`, as load_key_folder() does; without a folder, the shared ones.
Result<KeyRing> load_keys(const std::optional<std::string>& folder, Role own_role);

}  // namespace penstock::net
