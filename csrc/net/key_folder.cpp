// SPDX-License-Identifier: Apache-2.0
#include "net/key_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <new>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/process.h"
#include "net/key_making.h"

namespace penstock::net {

Result<KeyRing> load_key_folder(const std::string& folder, Role own_role, KeyOrigin origin) {
  auto fd = open_key_folder(folder);
  if (!fd) return fd.error();
  const int folder_fd = fd.value().get();
  auto keys = load_public_keys(folder_fd, folder);
  if (!keys) return keys.error();
  auto own = load_secret(folder_fd, folder, own_role);
  if (!own) return own.error();
  if (!keys.value().admits(own.value().public_key(), own_role)) return no_key_pair(folder, own_role);
  std::error_code unknown;
  const auto path = std::filesystem::absolute(folder, unknown);  // a job may change the process's working folder
  return KeyRing(own_role, std::move(own).value(), std::move(keys).value(), origin,
                 unknown ? std::string() : path.string());
}

std::string warning_of_workers_keys(const std::string& folder) {
  const FileDescriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  std::string others;
  for (const Role role : kRoles) {
    if (!fd || role == Role::kWorker || !has_secret(fd.get(), role)) continue;
    others += (others.empty() ? "" : ", ") + key_file_name(role, ".secret");
  }
  if (others.empty()) return "";
  return "the key folder " + folder + " contains " + others +
         " in addition to worker.secret, so datasets that this worker runs can read them and act in these roles; use a "
         "separate folder for workers with only worker.secret and the .public files";
}

namespace {

// A stamp of the public keys' file metadata. It differs after each change of a key.
Result<std::string> stamp_of(int folder_fd, const std::string& folder) {
  std::vector<std::string> stamps;
  auto listed = list_key_files(folder_fd, folder, [&](std::string_view file) -> Result<void> {
    if (!file.ends_with(".public")) return {};
    const std::string name(file);
    struct stat status {};
    if (::fstatat(folder_fd, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) return {};  // it has just been removed
    std::string stamp = name;
    for (const auto number :
         {static_cast<int64_t>(status.st_ino), static_cast<int64_t>(status.st_size),
          static_cast<int64_t>(status.st_mtim.tv_sec), static_cast<int64_t>(status.st_mtim.tv_nsec),
          static_cast<int64_t>(status.st_ctim.tv_sec), static_cast<int64_t>(status.st_ctim.tv_nsec)})
      stamp += " " + std::to_string(number);
    stamps.push_back(std::move(stamp));
    return {};
  });
  if (!listed) return listed.error();
  std::sort(stamps.begin(), stamps.end());
  std::string all;
  for (const std::string& stamp : stamps) all += stamp + "\n";
  return all;
}

// Names for a sentence; only the first ones of many.
std::string format_names(const std::vector<std::string>& names) {
  constexpr size_t kListedNamesMax = 8;
  std::string text;
  for (size_t place = 0; place < std::min(names.size(), kListedNamesMax); ++place)
    text += (place == 0 ? "" : ", ") + names[place];
  return names.size() <= kListedNamesMax ? text
                                         : text + " and " + std::to_string(names.size() - kListedNamesMax) + " more";
}

// The holders with individual keys in `keys` that are not in `others`.
std::vector<std::string> named_beyond(const PublicKeys& keys, const PublicKeys& others) {
  std::vector<std::string> names;
  for (const auto& [key, user] : keys.users)
    if (!others.users.contains(key)) names.push_back(user);
  for (const auto& [key, machine] : keys.machines)
    if (!others.machines.contains(key)) names.push_back("the machine " + machine);
  return names;
}

std::string format_change(const std::string& folder, Role own_role, const PublicKeys& before, const PublicKeys& after) {
  const std::vector<std::string> added = named_beyond(after, before), removed = named_beyond(before, after);
  std::vector<std::string> other_roles, retained, retired;
  for (const Role role : kRoles) {
    const auto place = static_cast<size_t>(role);
    if (role == own_role) continue;
    const std::string name(role_name(role));
    if (before.roles[place] != after.roles[place]) other_roles.push_back(name);
    if (after.former[place] && after.former[place] != before.former[place]) retained.push_back(name);
    if (before.former[place] && !after.former[place]) retired.push_back(name);
  }
  std::string text = "has read the keys in " + folder + " again";
  if (!removed.empty()) text += "; no longer accepted: the keys of " + format_names(removed);
  if (!added.empty()) text += "; now accepted: the keys of " + format_names(added);
  if (!other_roles.empty()) text += "; changed keys: " + format_names(other_roles);
  if (!retained.empty()) text += "; the former keys are also accepted for: " + format_names(retained);
  if (!retired.empty()) text += "; the former keys are no longer accepted for: " + format_names(retired);
  const auto own = static_cast<size_t>(own_role);
  if (before.roles[own] != after.roles[own])
    text += "; the key of this process has changed there, which takes effect when the process is restarted";
  return text;
}

}  // namespace

Result<std::optional<KeyFolderWatch::Change>> KeyFolderWatch::look() {
  auto fd = open_key_folder(folder_);
  if (!fd) return fd.error();
  const int folder_fd = fd.value().get();
  // Before the files are read: a change in the meantime is then detected the next time.
  auto stamp = stamp_of(folder_fd, folder_);
  if (!stamp) return stamp.error();
  if (stamp.value() == stamp_) return std::optional<Change>();
  auto loaded = load_public_keys(folder_fd, folder_);
  if (!loaded) return loaded.error();
  stamp_ = std::move(stamp).value();
  PublicKeys keys = std::move(loaded).value();
  if (keys == known_) return std::optional<Change>();
  Change change{.keys = keys, .notice = format_change(folder_, own_role_, known_, keys)};
  known_ = std::move(keys);
  return std::optional(std::move(change));
}

struct KeyFolderReader::State {
  explicit State(std::string path) : folder(std::move(path)) {}

  const std::string folder;
  Mutex mutex;
  bool is_reading PENSTOCK_GUARDED_BY(mutex) = false;
  std::optional<PublicKeys> found PENSTOCK_GUARDED_BY(mutex);
};

KeyFolderReader::KeyFolderReader(std::string folder) : state_(std::make_shared<State>(std::move(folder))) {}

void KeyFolderReader::ask(Instant now) {
  if (requested_at_ && now - *requested_at_ < kKeyReadInterval) return;
  {
    const MutexLock lock(state_->mutex);
    if (std::exchange(state_->is_reading, true)) return;
  }
  requested_at_ = now;
  try {
    std::thread([state = state_] {
      begin_own_thread("pk_key_read");
      std::optional<PublicKeys> found;
      try {
        const auto fd = open_key_folder(state->folder);
        if (auto keys = fd ? load_public_keys(fd.value().get(), state->folder) : fd.error())
          found = std::move(keys).value();
      } catch (const std::bad_alloc&) {  // the next ask() reads again
      }
      const MutexLock lock(state->mutex);
      state->found = std::move(found);
      state->is_reading = false;
    }).detach();
  } catch (const std::system_error&) {  // no thread is left; the next ask() retries
    const MutexLock lock(state_->mutex);
    state_->is_reading = false;
  }
}

std::optional<PublicKeys> KeyFolderReader::take() {
  const MutexLock lock(state_->mutex);
  return std::exchange(state_->found, std::nullopt);
}

namespace {

constexpr mode_t kOthersMode = S_IRWXG | S_IRWXO;

std::string octal_mode(mode_t mode) {
  char text[8];
  std::snprintf(text, sizeof text, "%04o", mode & 07777);
  return text;
}

Result<void> check_owner_and_mode(const struct stat& status, const std::string& path) {
  if (status.st_uid != ::geteuid()) {
    return key_error(Errc::kMismatch, path,
                     "it belongs to the user with id " + std::to_string(status.st_uid) +
                         " but this process runs as the user with id " + std::to_string(::geteuid()),
                     "use your own keys, and do not trust keys that others can change");
  }
  if ((status.st_mode & kOthersMode) != 0) {
    return key_error(Errc::kMismatch, path, "its mode is " + octal_mode(status.st_mode) + ", which gives others access",
                     "create new keys if others may have read them, otherwise run chmod go= " + path);
  }
  return {};
}

// Reads a key file into `text` and returns it without its newline. A public key gets the same checks as a secret: an
// account that can write it can admit itself.
Result<std::string_view> read_key_file(int folder_fd, const std::string& folder, const std::string& name,
                                       KeyFileText& text) {
  const std::string path = folder + "/" + name;
  // Without O_NONBLOCK, opening a FIFO in place of the file would block.
  const FileDescriptor fd(::openat(folder_fd, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (!fd && errno == ELOOP) {
    return key_error(Errc::kMismatch, path, "it is a symbolic link, but a key must be a regular file",
                     "replace the link with the file");
  }
  if (!fd) return key_system_error("opening the key", path, errno);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return key_system_error("reading the status of the key", path, errno);
  if (!S_ISREG(status.st_mode)) {
    return key_error(Errc::kMismatch, path, "it is not a regular file", "create keys with penstock keys");
  }
  if (auto checked = check_owner_and_mode(status, path); !checked) return checked.error();
  size_t length = 0;
  while (length < kKeyFileBytes) {
    const ssize_t count = ::read(fd.get(), text.bytes().data() + length, kKeyFileBytes - length);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return key_system_error("reading the key", path, errno);
    if (count == 0) break;
    length += static_cast<size_t>(count);
  }
  const bool has_newline = length == kKeyFileBytes && text.characters()[kKeyTextLength] == '\n';
  if (status.st_size > static_cast<off_t>(kKeyFileBytes) || length < kKeyTextLength ||
      (length == kKeyFileBytes && !has_newline)) {
    return key_error(Errc::kMalformed, path,
                     "it is " + std::to_string(status.st_size) + " bytes long, but a key must have " +
                         std::to_string(kKeyTextLength) + " characters and a newline",
                     "copy the file again, or create new keys with penstock keys");
  }
  return text.text().substr(0, kKeyTextLength);
}

Fault not_z85(const std::string& path) {
  return key_error(Errc::kMalformed, path, "its text is not Z85",
                   "copy the file again, or create new keys with penstock keys");
}

Result<PublicKey> load_public(int folder_fd, const std::string& folder, const std::string& name) {
  KeyFileText text;
  auto read = read_key_file(folder_fd, folder, name, text);
  if (!read) return read.error();
  auto key = PublicKey::parse(read.value());
  if (!key) return not_z85(folder + "/" + name);
  return key;
}

std::string with_article(Role role) { return (role == Role::kOperator ? "an " : "a ") + std::string(role_name(role)); }

// The error for a folder with the secret of another role: most likely a trainer's folder, given to an operator command.
std::optional<Fault> other_role(int folder_fd, const std::string& folder, Role role) {
  if (has_secret(folder_fd, role)) return std::nullopt;
  for (const Role other : kRoles) {
    if (!has_secret(folder_fd, other)) continue;
    return key_error(Errc::kMismatch, folder,
                     "the folder contains the keys of " + with_article(other) +
                         ", but this process needs the keys of " + with_article(role),
                     "pass a folder with " + key_file_name(role, ".secret"));
  }
  return std::nullopt;
}

Result<RoleKeys> load_role_keys(int folder_fd, const std::string& folder) {
  RoleKeys keys;
  for (size_t place = 0; place < kRoles.size(); ++place) {
    auto key = load_public(folder_fd, folder, key_file_name(kRoles[place], ".public"));
    if (!key) return key.error();
    for (size_t before = 0; before < place; ++before) {
      if (keys[before] != key.value()) continue;
      return key_error(Errc::kMismatch, folder,
                       "the roles " + std::string(role_name(kRoles[before])) + " and " +
                           std::string(role_name(kRoles[place])) +
                           " have the same key, but each role must have a different key",
                       "create new keys with penstock keys");
    }
    keys[place] = key.value();
  }
  return keys;
}

// The names of these holders in the folder.
Result<std::vector<std::string>> names_of(const Holders& holders, int folder_fd, const std::string& folder) {
  std::vector<std::string> names;
  auto listed = list_key_files(folder_fd, folder, [&](std::string_view file) -> Result<void> {
    if (!file.ends_with(holders.ending)) return {};
    const std::string_view name = file.substr(0, file.size() - holders.ending.size());
    if (!is_key_name(name)) return {};  // for example a file that is being written
    if (names.size() == holders.count_max) {
      const std::string all = std::string(holders.what) + "s";
      return key_error(Errc::kMismatch, folder,
                       "it contains keys of more than " + std::to_string(holders.count_max) + " " + all,
                       "remove the keys of " + all + " that have left");
    }
    names.emplace_back(name);
    return {};
  });
  if (!listed) return listed.error();
  return names;
}

// The former keys that are still valid. A former key that is also the role's present key does not count: its rotation
// is about to start.
Result<FormerKeys> load_former_keys(int folder_fd, const std::string& folder, const RoleKeys& roles) {
  FormerKeys former;
  for (const Role role : kRoles) {
    const auto place = static_cast<size_t>(role);
    const std::string name = key_file_name(role, kFormerEnding);
    if (!has_key_file(folder_fd, name)) continue;
    auto key = load_public(folder_fd, folder, name);
    if (!key) return key.error();
    if (key.value() == roles[place]) continue;
    const bool is_anothers = std::find(roles.begin(), roles.end(), key.value()) != roles.end() ||
                             std::find(former.begin(), former.end(), key.value()) != former.end();
    if (is_anothers)
      return key_error(Errc::kMismatch, folder + "/" + name, "it is the key of another role",
                       "copy the file again from the folder whose keys were rotated");
    former[place] = key.value();
  }
  return former;
}

// Adds the keys of these holders to `names`. `known` has all keys of the folder so far.
Result<void> load_holders(const Holders& holders, int folder_fd, const std::string& folder, std::set<PublicKey>& known,
                          KeyNames& names) {
  const std::string what(holders.what);
  auto found = names_of(holders, folder_fd, folder);
  if (!found) return found.error();
  for (const std::string& name : found.value()) {
    auto key = load_public(folder_fd, folder, name + std::string(holders.ending));
    if (!key) return key.error();
    if (!known.insert(key.value()).second)
      return key_error(Errc::kMismatch, folder,
                       "the " + what + " " + name + " has the key of a role, or of another user or machine",
                       "create keys for each " + what + " with penstock keys --" + what);
    names.emplace(key.value(), name);
  }
  return {};
}

}  // namespace

bool is_key_name(std::string_view name) {
  return !name.empty() && name.size() <= kKeyNameBytesMax && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return c < 0x80 && (std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.');
         });
}

std::string key_file_name(Role role, std::string_view ending) { return std::string(role_name(role)).append(ending); }

Fault key_error(Errc code, const std::string& path, const std::string& seen, const std::string& hint) {
  return {code, "the keys in " + path + " cannot be used: " + seen + "; " + hint};
}

Fault key_system_error(const std::string& what, const std::string& path, int error_number) {
  const std::string hint = error_number == ENOENT ? "; create keys with penstock keys, or correct the path" : "";
  return {Errc::kFailed, what + " " + path + " failed: " + std::strerror(error_number) + hint};
}

Fault no_key_pair(const std::string& folder, Role role) {
  return key_error(Errc::kMismatch, folder,
                   key_file_name(role, ".secret") + " does not belong to " + key_file_name(role, ".public"),
                   "copy both from the folder created by penstock keys");
}

Result<FileDescriptor> open_key_folder(const std::string& folder) {
  FileDescriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return key_system_error("opening the key folder", folder, errno);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return key_system_error("reading the status of the key folder", folder, errno);
  if (auto checked = check_owner_and_mode(status, folder); !checked) return checked.error();
  return fd;
}

bool has_key_file(int folder_fd, const std::string& name) {
  return ::faccessat(folder_fd, name.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}
bool has_secret(int folder_fd, Role role) { return has_key_file(folder_fd, key_file_name(role, ".secret")); }

Result<KeyPair> load_secret(int folder_fd, const std::string& folder, Role role) {
  if (auto other = other_role(folder_fd, folder, role)) return *std::move(other);
  const std::string name = key_file_name(role, ".secret");
  KeyFileText text;
  auto read = read_key_file(folder_fd, folder, name, text);
  if (!read) return read.error();
  auto pair = KeyPair::parse_secret(read.value());
  if (!pair) return not_z85(folder + "/" + name);
  return pair;
}

Result<PublicKeys> load_public_keys(int folder_fd, const std::string& folder) {
  auto roles = load_role_keys(folder_fd, folder);
  if (!roles) return roles.error();
  auto former = load_former_keys(folder_fd, folder, roles.value());
  if (!former) return former.error();
  PublicKeys keys{.roles = roles.value(), .former = former.value()};
  std::set<PublicKey> known;
  for (const Role role : kRoles)
    for (const PublicKey& key : keys.generations(role)) known.insert(key);
  if (auto loaded = load_holders(kUserHolders, folder_fd, folder, known, keys.users); !loaded) return loaded.error();
  if (auto loaded = load_holders(kMachineHolders, folder_fd, folder, known, keys.machines); !loaded)
    return loaded.error();
  return keys;
}

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
