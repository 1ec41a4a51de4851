// SPDX-License-Identifier: Apache-2.0
#include "net/shared_key_folder.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "base/environment.h"
#include "net/key_folder.h"
#include "net/key_making.h"

namespace penstock::net {
namespace {

Fault unusable(const std::string& folder, const std::string& seen) {
  return {Errc::kMismatch, "the shared keys in " + folder + " cannot be used: " + seen +
                               "; it must be a folder of this user with mode 0700; remove it if it is unknown to you, "
                               "or create keys with penstock keys and pass their folder"};
}

// Whether the folder exists. An error if it exists, but not in the required state.
Result<bool> is_made(const std::string& folder) {
  struct stat status {};
  if (::lstat(folder.c_str(), &status) != 0) {
    if (errno == ENOENT) return false;
    return unusable(folder, std::string("reading its status failed: ") + std::strerror(errno));
  }
  if (!S_ISDIR(status.st_mode)) return unusable(folder, "it is not a folder");
  if (status.st_uid != ::geteuid()) return unusable(folder, "it belongs to another user");
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) return unusable(folder, "other users can access it");
  return true;
}

// A folder that is removed, with its contents, unless it was renamed.
class FolderAside {
 public:
  explicit FolderAside(const std::string& folder) : path_(folder + ".XXXXXX") {
    if (::mkdtemp(path_.data()) == nullptr) path_.clear();
  }
  FolderAside(const FolderAside&) = delete;
  FolderAside& operator=(const FolderAside&) = delete;
  ~FolderAside() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }

  const std::string& path() const { return path_; }

  // Returns false if another process's folder exists already.
  bool try_rename(const std::string& folder) {
    if (::rename(path_.c_str(), folder.c_str()) != 0) return false;
    path_.clear();
    return true;
  }

 private:
  std::string path_;
};

}  // namespace

SharedKeyPlaces SharedKeyPlaces::from_environment() {
  SharedKeyPlaces places{.runtime_folder = environment("XDG_RUNTIME_DIR").value_or(""),
                         .temp_folder = environment("TMPDIR").value_or("")};
  // The specification of XDG_RUNTIME_DIR requires ignoring a relative path.
  if (!places.runtime_folder.starts_with('/')) places.runtime_folder.clear();
  if (!places.temp_folder.starts_with('/')) places.temp_folder = "/tmp";
  return places;
}

Result<std::string> shared_key_folder(const SharedKeyPlaces& places) {
  const std::string folder = places.runtime_folder.empty()
                                 ? places.temp_folder + "/penstock-" + std::to_string(::geteuid())
                                 : places.runtime_folder + "/penstock";
  auto made = is_made(folder);
  if (!made) return made.error();
  if (made.value()) return folder;
  FolderAside aside(folder);
  if (aside.path().empty()) {
    return Fault{Errc::kFailed, "creating a folder for shared keys next to " + folder + " failed: " +
                                    std::strerror(errno) + "; create keys with penstock keys and pass their folder"};
  }
  if (auto keys = make_key_folder(aside.path()); !keys) return keys.error();
  if (aside.try_rename(folder)) return folder;
  const int error_number = errno;
  made = is_made(folder);
  if (!made) return made.error();
  if (made.value()) return folder;
  return unusable(folder, std::string("moving it into place failed: ") + std::strerror(error_number));
}

Result<KeyRing> load_shared_keys(Role own_role, const SharedKeyPlaces& places) {
  auto folder = shared_key_folder(places);
  if (!folder) return folder.error();
  return load_key_folder(folder.value(), own_role, KeyOrigin::kShared);
}

Result<KeyRing> load_keys(const std::optional<std::string>& folder, Role own_role) {
  return folder ? load_key_folder(*folder, own_role) : load_shared_keys(own_role);
}

}  // namespace penstock::net
