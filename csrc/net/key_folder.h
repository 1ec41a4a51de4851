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
//
// A process that was given no folder uses the one that the processes of its user share on the machine. The functions
// for single files of a folder are also for key_making.h, which creates them: any file that others could have read or
// written is rejected, with the path and the remedy.

#include <dirent.h>
#include <fcntl.h>
#include <sys/types.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "base/result.h"
#include "net/keys.h"

namespace penstock::net {

constexpr size_t kKeyNameBytesMax = 64;
constexpr size_t kUserCountMax = 4096;
constexpr size_t kMachineCountMax = 4096;

// Loads the keys for a process of `own_role`. The secrets of other roles are not read and need not exist.
Result<KeyRing> load_key_folder(const std::string& folder, Role own_role, KeyOrigin origin = KeyOrigin::kGiven);

// A warning about a folder given to a worker with secrets of other roles: datasets run in the worker's process and can
// read them. Empty if there are none, and for a folder that cannot be opened, which load_key_folder() rejects.
std::string warning_of_workers_keys(const std::string& folder);

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
  std::optional<Instant> requested_at_{};
};

inline constexpr size_t kKeyFileBytes = kKeyTextLength + 1;  // a key and a newline
using KeyFileText = Wiped<kKeyFileBytes>;
inline constexpr std::string_view kFormerEnding = ".former.public";

// The kinds of holders with individual keys.
struct Holders {
  std::string_view what;
  std::string_view ending;  // of the file names of their keys
  size_t count_max;
};
inline constexpr Holders kUserHolders{.what = "user", .ending = ".user.public", .count_max = kUserCountMax};
inline constexpr Holders kMachineHolders{.what = "machine", .ending = ".machine.public", .count_max = kMachineCountMax};

// Whether `name` is a valid name of a holder.
bool is_key_name(std::string_view name);
// The file name for a role and an ending, such as "worker.secret" for ".secret".
std::string key_file_name(Role role, std::string_view ending);

// An error whose text has the failure, the observed and expected facts, and the remedy.
Fault key_error(Errc code, const std::string& path, const std::string& seen, const std::string& hint);
Fault key_system_error(const std::string& what, const std::string& path, int error_number);
// The role's secret belongs to none of the keys by which the role is admitted.
Fault no_key_pair(const std::string& folder, Role role);

// Opens the folder after checking it. Files in it are then opened relative to the descriptor, so it remains the folder
// that was checked.
Result<FileDescriptor> open_key_folder(const std::string& folder);
bool has_key_file(int folder_fd, const std::string& name);
bool has_secret(int folder_fd, Role role);

Result<KeyPair> load_secret(int folder_fd, const std::string& folder, Role role);
// Loads all public keys of the folder. An error if one key belongs to two roles, users or machines.
Result<PublicKeys> load_public_keys(int folder_fd, const std::string& folder);

// Calls `take` with the name of each file in the folder.
template <typename Take>
Result<void> list_key_files(int folder_fd, const std::string& folder, const Take& take) {
  const int listed_fd = ::openat(folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> listed(listed_fd < 0 ? nullptr : ::fdopendir(listed_fd), ::closedir);
  if (!listed) return key_system_error("listing the key folder", folder, errno);
  errno = 0;
  while (const dirent* entry = ::readdir(listed.get())) {
    if (auto taken = take(std::string_view(entry->d_name)); !taken) return taken;
    errno = 0;
  }
  if (errno != 0) return key_system_error("listing the key folder", folder, errno);
  return {};
}

// The places where the folder of shared keys may be. The processes of one user share these keys on one machine if none
// were given, so that CURVE and roles are always enabled. The first process that needs them creates them, in a folder
// that only this user can enter. They are valid only on loopback (KeyOrigin::kShared): other machines have no copy, and
// no user has decided to give them one.
struct SharedKeyPlaces {
  std::string runtime_folder;  // of this user, 0700, removed when the user logs out; empty if there is none
  std::string temp_folder;     // shared by all users

  // $XDG_RUNTIME_DIR, and $TMPDIR or else /tmp.
  static SharedKeyPlaces from_environment();
};

// The path of that folder: `penstock` in the runtime folder or, without that, `penstock-UID` in the temporary folder.
// It is created with its keys if it does not exist; if several processes do so concurrently, one succeeds and all use
// its keys. A folder of another user, with a looser mode, or behind a symbolic link is rejected.
Result<std::string> shared_key_folder(const SharedKeyPlaces& places = SharedKeyPlaces::from_environment());

// Loads the keys of that folder for a process of `own_role`.
Result<KeyRing> load_shared_keys(Role own_role, const SharedKeyPlaces& places = SharedKeyPlaces::from_environment());

// Loads the keys in `folder`, as load_key_folder() does; without a folder, the shared ones.
Result<KeyRing> load_keys(const std::optional<std::string>& folder, Role own_role);

}  // namespace penstock::net
