// SPDX-License-Identifier: Apache-2.0
#pragma once
// The files of a key folder, for the code that reads and creates them (key_folder.h, key_making.h). Any file that
// others could have read or written is rejected, with the path and the remedy.

#include <dirent.h>
#include <fcntl.h>
#include <sys/types.h>

#include <cerrno>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"
#include "base/result.h"
#include "net/key_folder.h"
#include "net/key_ring.h"
#include "net/keys.h"

namespace penstock::net {

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
Fault key_error(Errc code, const std::string& path, const std::string& seen, const std::string& remedy);
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

}  // namespace penstock::net
