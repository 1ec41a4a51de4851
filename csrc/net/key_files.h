// SPDX-License-Identifier: Apache-2.0
#pragma once
// The files of a folder of keys, for those who read and who make them (key_folder.h, key_making.h). Whatever others
// could have read or written is refused, with the path and the remedy.

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

// Those who have keys of their own.
struct Holders {
  std::string_view what;
  std::string_view ending;  // of the names of their keys
  size_t count_max;
};
inline constexpr Holders kUserHolders{.what = "user", .ending = ".user.public", .count_max = kUserCountMax};
inline constexpr Holders kMachineHolders{.what = "machine", .ending = ".machine.public", .count_max = kMachineCountMax};

// Whether it can name one of them.
bool is_key_name(std::string_view name);
// As "worker.secret" of the role and ".secret".
std::string key_file_name(Role role, std::string_view ending);

// The error's text: the failure, the fact that was seen with the one that was expected, and the remedy.
Fault key_error(Errc code, const std::string& path, const std::string& seen, const std::string& remedy);
Fault key_system_error(const std::string& what, const std::string& path, int error_number);
// The secret of the role belongs to none of the keys by which it is let in.
Fault no_key_pair(const std::string& folder, Role role);

// The folder, checked. Files below it are then opened by way of the descriptor, so it stays the folder that was
// checked.
Result<FileDescriptor> open_key_folder(const std::string& folder);
bool has_key_file(int folder_fd, const std::string& name);
bool has_secret(int folder_fd, Role role);

Result<KeyPair> load_secret(int folder_fd, const std::string& folder, Role role);
// All of them. An error where one stands for two roles, users or machines.
Result<PublicKeys> load_public_keys(int folder_fd, const std::string& folder);

// Calls `take` with the name of each file of the folder.
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
