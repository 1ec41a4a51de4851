// SPDX-License-Identifier: Apache-2.0
#pragma once
// Makes the folder of keys of a pool and those of its users and machines, and replaces the keys of its roles
// (key_folder.h has what lies in them).

#include <string>

#include "base/result.h"

namespace penstock::net {

// Makes a key pair for each role. The folder is made if it is not there. An existing key is never overwritten: then,
// and on any other failure, nothing is changed.
Result<void> make_key_folder(const std::string& folder);

// Makes a pair for the user: NAME.user.public in the pool's folder, and a folder of the user's own, which must not be
// there, with the pair as trainer.public and trainer.secret, and the other public keys. Names are of letters, digits,
// "-", "_" and "."; on any failure nothing is changed.
Result<void> make_user_keys(const std::string& folder, const std::string& user, const std::string& user_folder);

// The same for a machine: NAME.machine.public in the pool's folder, and a folder for that machine with the pair's
// secret as worker.secret and the public keys of roles, users and the machine itself. Whoever has all public keys of
// the pool may put them there again.
Result<void> make_machine_keys(const std::string& folder, const std::string& machine,
                               const std::string& machine_folder);

// Makes a new pair for each role and keeps the public keys of before as the former ones. Users and machines keep their
// keys. Refused while there are former keys already, unless an earlier call was interrupted: this one completes it.
// Whenever it is interrupted, the folder can be used, and whoever was let in before still is.
Result<void> rotate_keys(const std::string& folder);

// Removes the former keys from the folder of the pool, or of one host. Refused where a secret in it belongs to one of
// them. Also completes an earlier call.
Result<void> finish_rotation(const std::string& folder);

}  // namespace penstock::net
