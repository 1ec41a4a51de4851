// SPDX-License-Identifier: Apache-2.0
#pragma once
// A folder of keys: ROLE.public and ROLE.secret for each role, each file one key in Z85 and a newline. The folder is
// 0700 and its files are 0600. A host holds the secret of its own role and all the public keys: whoever holds a role's
// secret can act in that role. A folder that others could have read or written is refused as a whole.
//
// NAME.user.public is the key of a user who trains with keys of his own. Controllers and workers let him in as a
// trainer, and the controller knows his trainers as his. NAME.machine.public is the key of a machine. The controller
// lets its holder in as a worker, and knows its workers as that machine's. Trainers know each worker by the key that it
// shows to the controller.
//
// ROLE.former.public is the key that a role had before its rotation, which counts beside the new one until the rotation
// is finished. A process may have the secret of either, and knows servers by both.
//
// Servers look at the public keys of their folder time and again, so that a key that is removed is let in no more.
// Clients look there when a server turns out to have another key than they know.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/instant.h"
#include "base/result.h"
#include "net/key_ring.h"

namespace penstock::net {

constexpr size_t kKeyNameBytesMax = 64;
constexpr size_t kUserCountMax = 4096;
constexpr size_t kMachineCountMax = 4096;

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

constexpr Duration kKeyReadInterval = std::chrono::seconds(1);

// Reads the public keys of a folder again for a client, on a thread of its own: an I/O thread must not wait for a file
// system. The thread is detached, as those of Resolver are. Confined to one thread.
class KeyFolderReader {
 public:
  explicit KeyFolderReader(std::string folder);

  // Begins to read unless it is at it, or has done so within kKeyReadInterval.
  void ask(Instant now);
  // The keys that were read since the last call. Nothing where there are none, or they cannot be used.
  std::optional<PublicKeys> take();

 private:
  struct State;
  const std::shared_ptr<State> state_;  // with the thread that reads
  std::optional<Instant> asked_at_{};
};

// The keys for a process of `own_role`. The secrets of other roles are not read and need not be there.
Result<KeyRing> load_key_folder(const std::string& folder, Role own_role, KeyOrigin origin = KeyOrigin::kGiven);

// What to say of a folder that a worker was given with secrets of other roles: datasets run in its process and can read
// them. Empty where there are none, and for a folder that cannot be looked into, which load_key_folder() refuses.
std::string warning_of_workers_keys(const std::string& folder);

}  // namespace penstock::net
