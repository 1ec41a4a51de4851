// SPDX-License-Identifier: Apache-2.0
#pragma once
// A key folder: ROLE.public and ROLE.secret for each role, each file one key in Z85 and a newline. The folder has mode
// 0700 and its files 0600. A host holds the secret of its role and all public keys: the holder of a role's secret can
// act in that role. A folder that others could have read or written is rejected as a whole.
//
// NAME.user.public is the key of a user who trains with individual keys. Controllers and workers admit the user as a
// trainer, and the controller attributes such trainers to the user. NAME.machine.public is the key of a machine. The
// controller admits its holder as a worker, and attributes its workers to that machine. Trainers identify each worker
// by the key that it shows to the controller.
//
// ROLE.former.public is the key that a role had before its rotation, which remains valid together with the new one
// until the rotation is finished. A process may have the secret of either, and accepts servers with either.
//
// Servers check the public keys of their folder periodically, so that a removed key is no longer admitted. Clients
// check them when a server turns out to have an unknown key.

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

// Detects changes of the public keys of a folder. Confined to one thread.
class KeyFolderWatch {
 public:
  // `known` are the keys that were read last.
  KeyFolderWatch(std::string folder, Role own_role, PublicKeys known)
      : folder_(std::move(folder)), own_role_(own_role), known_(std::move(known)) {}

  struct Change {
    PublicKeys keys{};
    std::string notice{};  // whose keys were added or removed
  };
  // Returns none if the keys are unchanged. An error if the folder cannot be used now; the known keys then stay in
  // force. Reads files.
  Result<std::optional<Change>> look();

 private:
  const std::string folder_;
  const Role own_role_;
  PublicKeys known_;
  std::string stamp_;  // metadata of the files that were read
};

constexpr Duration kKeyReadInterval = std::chrono::seconds(1);

// Rereads the public keys of a folder for a client, on a separate thread: an I/O thread must not wait for a file
// system. The thread is detached, like the threads of Resolver. Confined to one thread.
class KeyFolderReader {
 public:
  explicit KeyFolderReader(std::string folder);

  // Starts to read unless a read is in progress, or was started within kKeyReadInterval.
  void ask(Instant now);
  // Returns the keys that were read since the last call. None if there are none, or they cannot be used.
  std::optional<PublicKeys> take();

 private:
  struct State;
  const std::shared_ptr<State> state_;  // shared with the reading thread
  std::optional<Instant> asked_at_{};
};

// Loads the keys for a process of `own_role`. The secrets of other roles are not read and need not exist.
Result<KeyRing> load_key_folder(const std::string& folder, Role own_role, KeyOrigin origin = KeyOrigin::kGiven);

// A warning about a folder given to a worker with secrets of other roles: datasets run in the worker's process and can
// read them. Empty if there are none, and for a folder that cannot be opened, which load_key_folder() rejects.
std::string warning_of_workers_keys(const std::string& folder);

}  // namespace penstock::net
