// SPDX-License-Identifier: Apache-2.0
#pragma once
// A folder of keys: ROLE.public and ROLE.secret for each role, each file one key in Z85 and a newline. The folder is
// 0700 and its files are 0600. A host holds the secret of its own role and all the public keys: whoever holds a role's
// secret can act in that role. A folder that others could have read or written is refused as a whole.
//
// NAME.user.public is the key of a user who trains with keys of his own. Controllers and workers let him in as a
// trainer, and the controller knows his trainers as his.
//
// Servers look at the public keys of their folder time and again, so that a key that is removed is let in no more.

#include <optional>
#include <string>
#include <utility>

#include "base/result.h"
#include "net/key_ring.h"

namespace penstock::net {

// Makes a key pair for each role. The folder is made if it is not there. An existing key is never overwritten: then,
// and on any other failure, nothing is changed.
Result<void> make_key_folder(const std::string& folder);

constexpr size_t kUserNameBytesMax = 64;
constexpr size_t kUserCountMax = 4096;

// Makes a pair for the user: NAME.user.public in the pool's folder, and a folder of the user's own, which must not be
// there, with the pair as trainer.public and trainer.secret, and the other public keys. Names are of letters, digits,
// "-", "_" and "."; on any failure nothing is changed.
Result<void> make_user_keys(const std::string& folder, const std::string& user, const std::string& user_folder);

// Looks whether the public keys of a folder are others than before. Confined to one thread.
class KeyFolderWatch {
 public:
  // `known` are those that were read last.
  KeyFolderWatch(std::string folder, Role own_role, PublicKeys known)
      : folder_(std::move(folder)), own_role_(own_role), known_(std::move(known)) {}

  struct Change {
    PublicKeys keys{};
    std::string notice{};  // whose keys are new, and whose are gone
  };
  // Nothing while all is as it was. An error where the folder cannot be used now: then what was known stays. Reads
  // files.
  Result<std::optional<Change>> look();

 private:
  const std::string folder_;
  const Role own_role_;
  PublicKeys known_;
  std::string stamp_;  // what the file system said of the files that were read
};

// The keys for a process of `own_role`. The secrets of other roles are not read and need not be there.
Result<KeyRing> load_key_folder(const std::string& folder, Role own_role, KeyOrigin origin = KeyOrigin::kGiven);

// What to say of a folder that a worker was given with secrets of other roles: datasets run in its process and can read
// them. Empty where there are none, and for a folder that cannot be looked into, which load_key_folder() refuses.
std::string warning_of_workers_keys(const std::string& folder);

}  // namespace penstock::net
