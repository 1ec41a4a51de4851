// SPDX-License-Identifier: Apache-2.0
#pragma once
// Creates a pool's key folder and the key folders of its users and machines, and replaces the keys of its roles
// (key_folder.h describes their contents).

#include <string>

#include "base/result.h"

namespace penstock::net {

// Creates a key pair for each role. The folder is created if it does not exist. An existing key is never overwritten:
// in that case, and on any other failure, no file is changed.
Result<void> make_key_folder(const std::string& folder);

// Creates a pair for the user: NAME.user.public in the pool's folder, and a folder for the user, which must not exist,
// with the pair as trainer.public and trainer.secret, and the other public keys. Names consist of letters, digits, "-",
// "_" and "."; on any failure no file is changed.
Result<void> make_user_keys(const std::string& folder, const std::string& user, const std::string& user_folder);

// The same for a machine: NAME.machine.public in the pool's folder, and a folder for that machine with the pair's
// secret as worker.secret and the public keys of roles, users and the machine itself. A user who has all public keys of
// the pool may copy them there again.
Result<void> make_machine_keys(const std::string& folder, const std::string& machine,
                               const std::string& machine_folder);

// Creates a new pair for each role and keeps the previous public keys as the former ones. Users and machines keep their
// keys. Refused while there are former keys already, unless an earlier call was interrupted, which this call completes.
// Whenever it is interrupted, the folder remains usable, and all previous key holders are still admitted.
Result<void> rotate_keys(const std::string& folder);

// Removes the former keys from the folder of the pool, or of one host. Refused if a secret in the folder belongs to one
// of them. Also completes an earlier call.
Result<void> finish_rotation(const std::string& folder);

}  // namespace penstock::net
