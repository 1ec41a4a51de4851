// SPDX-License-Identifier: Apache-2.0
#include "net/key_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"

namespace penstock::net {
namespace {

constexpr mode_t kFolderMode = 0700;
constexpr mode_t kFileMode = 0600;
constexpr mode_t kOthersMode = S_IRWXG | S_IRWXO;
constexpr size_t kFileBytes = kKeyTextLength + 1;  // a key and a newline

constexpr std::string_view kUserEnding = ".user.public";

using FileText = Wiped<kFileBytes>;

std::string file_name(Role role, std::string_view kind) { return std::string(role_name(role)).append(kind); }

std::string octal_mode(mode_t mode) {
  char text[8];
  std::snprintf(text, sizeof text, "%04o", mode & 07777);
  return text;
}

// The error's text: the failure, the fact that was seen with the one that was expected, and the remedy.
Fault key_error(Errc code, const std::string& path, const std::string& seen, const std::string& remedy) {
  return {code, "the keys in " + path + " cannot be used: " + seen + "; " + remedy};
}

Fault system_error(const std::string& what, const std::string& path, int error_number) {
  const std::string remedy = error_number == ENOENT ? "; make keys with penstock keys, or correct the path" : "";
  return {Errc::kFailed, what + " " + path + " failed: " + std::strerror(error_number) + remedy};
}

Result<void> check_owner_and_mode(const struct stat& status, const std::string& path) {
  if (status.st_uid != ::geteuid()) {
    return key_error(Errc::kMismatch, path,
                     "it belongs to the user with id " + std::to_string(status.st_uid) +
                         " and this process runs as the one with id " + std::to_string(::geteuid()),
                     "use keys of your own, and trust no keys that others can change");
  }
  if ((status.st_mode & kOthersMode) != 0) {
    return key_error(Errc::kMismatch, path, "its mode is " + octal_mode(status.st_mode) + ", which lets others at it",
                     "make new keys if others may have read them, else run chmod go= " + path);
  }
  return {};
}

// The folder, checked. Files below it are then opened by way of the descriptor, so it stays the folder that was
// checked.
Result<FileDescriptor> open_folder(const std::string& folder) {
  FileDescriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return system_error("opening the key folder", folder, errno);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return system_error("looking at the key folder", folder, errno);
  if (auto checked = check_owner_and_mode(status, folder); !checked) return checked.error();
  return fd;
}

// The text of a key file without its newline, in `text`. A public key gets the same checks as a secret: who can write
// it can let himself in.
Result<std::string_view> read_key_file(int folder_fd, const std::string& folder, const std::string& name,
                                       FileText& text) {
  const std::string path = folder + "/" + name;
  // Without O_NONBLOCK a FIFO in the place of the file would be waited on.
  const FileDescriptor fd(::openat(folder_fd, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (!fd && errno == ELOOP) {
    return key_error(Errc::kMismatch, path, "it is a symbolic link, and a key must be a file of its own",
                     "put the file itself there");
  }
  if (!fd) return system_error("opening the key", path, errno);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return system_error("looking at the key", path, errno);
  if (!S_ISREG(status.st_mode)) {
    return key_error(Errc::kMismatch, path, "it is not a regular file", "make keys with penstock keys");
  }
  if (auto checked = check_owner_and_mode(status, path); !checked) return checked.error();
  size_t length = 0;
  while (length < kFileBytes) {
    const ssize_t count = ::read(fd.get(), text.bytes().data() + length, kFileBytes - length);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return system_error("reading the key", path, errno);
    if (count == 0) break;
    length += static_cast<size_t>(count);
  }
  const bool has_newline = length == kFileBytes && text.characters()[kKeyTextLength] == '\n';
  if (status.st_size > static_cast<off_t>(kFileBytes) || length < kKeyTextLength ||
      (length == kFileBytes && !has_newline)) {
    return key_error(Errc::kMalformed, path,
                     "it is " + std::to_string(status.st_size) + " bytes long and a key is " +
                         std::to_string(kKeyTextLength) + " characters and a newline",
                     "copy the file again, or make new keys with penstock keys");
  }
  return text.text().substr(0, kKeyTextLength);
}

Fault not_z85(const std::string& path) {
  return key_error(Errc::kMalformed, path, "its text is no Z85, which is how keys are written",
                   "copy the file again, or make new keys with penstock keys");
}

Result<PublicKey> load_public(int folder_fd, const std::string& folder, const std::string& name) {
  FileText text;
  auto read = read_key_file(folder_fd, folder, name, text);
  if (!read) return read.error();
  auto key = PublicKey::parse(read.value());
  if (!key) return not_z85(folder + "/" + name);
  return key;
}

std::string with_article(Role role) { return (role == Role::kOperator ? "an " : "a ") + std::string(role_name(role)); }

bool has_secret(int folder_fd, Role role) {
  return ::faccessat(folder_fd, file_name(role, ".secret").c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

// A folder with the secret of another role: most likely a trainer's, given to a command for operators.
std::optional<Fault> other_role(int folder_fd, const std::string& folder, Role role) {
  if (has_secret(folder_fd, role)) return std::nullopt;
  for (const Role other : kRoles) {
    if (!has_secret(folder_fd, other)) continue;
    return key_error(
        Errc::kMismatch, folder,
        "the folder has the keys of " + with_article(other) + " and this needs those of " + with_article(role),
        "name a folder with " + file_name(role, ".secret"));
  }
  return std::nullopt;
}

Result<KeyPair> load_secret(int folder_fd, const std::string& folder, Role role) {
  if (auto other = other_role(folder_fd, folder, role)) return *std::move(other);
  const std::string name = file_name(role, ".secret");
  FileText text;
  auto read = read_key_file(folder_fd, folder, name, text);
  if (!read) return read.error();
  auto pair = KeyPair::parse_secret(read.value());
  if (!pair) return not_z85(folder + "/" + name);
  return pair;
}

Result<void> write_whole(int fd, std::string_view text, const std::string& path) {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return system_error("writing the key", path, errno);
    text.remove_prefix(static_cast<size_t>(count));
  }
  return {};
}

// The files of one run of make_key_folder: all of them come to stay, or none.
class NewFiles {
 public:
  NewFiles(int folder_fd, const std::string& folder) : folder_fd_(folder_fd), folder_(folder) {}
  NewFiles(const NewFiles&) = delete;
  NewFiles& operator=(const NewFiles&) = delete;
  ~NewFiles() {
    for (const auto& name : names_) ::unlinkat(folder_fd_, name.c_str(), 0);
  }

  // Appears under its name complete and on disk, or not at all.
  Result<void> add(const std::string& name, std::string_view text) {
    const std::string path = folder_ + "/" + name;
    const std::string aside = "." + name + "." + std::to_string(::getpid());
    {
      const FileDescriptor fd(
          ::openat(folder_fd_, aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kFileMode));
      if (!fd) return system_error("making the key", path, errno);
      names_.push_back(aside);
      if (auto written = write_whole(fd.get(), text, path); !written) return written.error();
      if (::fsync(fd.get()) != 0) return system_error("writing the key", path, errno);
    }
    if (!try_rename(aside, name)) {
      if (errno == EEXIST) return already_there(path);
      return system_error("making the key", path, errno);
    }
    names_.back() = name;
    return {};
  }

  Result<void> keep() {
    if (::fsync(folder_fd_) != 0) return system_error("writing the folder", folder_, errno);
    names_.clear();
    return {};
  }

  static Fault already_there(const std::string& path) {
    return {Errc::kMismatch, "making keys failed: " + path +
                                 " is there already, and a key that is lost cannot be had again; name another folder, "
                                 "or move the old keys away"};
  }

 private:
  bool try_rename(const std::string& aside, const std::string& name) const {
    if (::renameat2(folder_fd_, aside.c_str(), folder_fd_, name.c_str(), RENAME_NOREPLACE) == 0) return true;
    if (errno != EINVAL && errno != ENOSYS) return false;
    // A file system that cannot refuse to replace: the names were looked at before.
    return ::renameat(folder_fd_, aside.c_str(), folder_fd_, name.c_str()) == 0;
  }

  int folder_fd_;
  std::string folder_;
  std::vector<std::string> names_;
};

std::string with_newline(std::string text) { return std::move(text) + '\n'; }

Result<void> add_secret(NewFiles& files, const std::string& name, const KeyPair& pair) {
  FileText secret;
  const SecretText text = pair.secret_text();
  text.text().copy(secret.characters().data(), kKeyTextLength);
  secret.characters()[kKeyTextLength] = '\n';
  return files.add(name, secret.text());
}

Result<void> fill_key_folder(const std::string& folder) {
  auto fd = open_folder(folder);
  if (!fd) return fd.error();
  const int folder_fd = fd.value().get();
  for (const Role role : kRoles) {
    for (const auto* kind : {".public", ".secret"}) {
      const std::string name = file_name(role, kind);
      struct stat status {};
      if (::fstatat(folder_fd, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0) {
        std::string path = folder;
        return NewFiles::already_there(path.append("/").append(name));
      }
    }
  }
  NewFiles files(folder_fd, folder);
  for (const Role role : kRoles) {
    const KeyPair pair = KeyPair::generate();
    if (auto made = add_secret(files, file_name(role, ".secret"), pair); !made) return made.error();
    if (auto made = files.add(file_name(role, ".public"), with_newline(pair.public_key().text())); !made)
      return made.error();
  }
  return files.keep();
}

bool is_user_name(std::string_view name) {
  return !name.empty() && name.size() <= kUserNameBytesMax && name.front() != '.' &&
         std::all_of(name.begin(), name.end(), [](unsigned char c) {
           return c < 0x80 && (std::isalnum(c) != 0 || c == '-' || c == '_' || c == '.');
         });
}

Result<RoleKeys> load_role_keys(int folder_fd, const std::string& folder) {
  RoleKeys keys;
  for (size_t place = 0; place < kRoles.size(); ++place) {
    auto key = load_public(folder_fd, folder, file_name(kRoles[place], ".public"));
    if (!key) return key.error();
    for (size_t before = 0; before < place; ++before) {
      if (keys[before] != key.value()) continue;
      return key_error(Errc::kMismatch, folder,
                       "the roles " + std::string(role_name(kRoles[before])) + " and " +
                           std::string(role_name(kRoles[place])) +
                           " have the same key, and a key must stand for one role",
                       "make new keys with penstock keys");
    }
    keys[place] = key.value();
  }
  return keys;
}

// Calls `take` with the name of each file of the folder.
template <typename Take>
Result<void> list_files(int folder_fd, const std::string& folder, const Take& take) {
  const int listed_fd = ::openat(folder_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const std::unique_ptr<DIR, int (*)(DIR*)> listed(listed_fd < 0 ? nullptr : ::fdopendir(listed_fd), ::closedir);
  if (!listed) return system_error("listing the key folder", folder, errno);
  errno = 0;
  while (const dirent* entry = ::readdir(listed.get())) {
    if (auto taken = take(std::string_view(entry->d_name)); !taken) return taken;
    errno = 0;
  }
  if (errno != 0) return system_error("listing the key folder", folder, errno);
  return {};
}

// The names of the folder's users.
Result<std::vector<std::string>> user_names(int folder_fd, const std::string& folder) {
  std::vector<std::string> names;
  auto listed = list_files(folder_fd, folder, [&](std::string_view file) -> Result<void> {
    if (!file.ends_with(kUserEnding)) return {};
    const std::string_view name = file.substr(0, file.size() - kUserEnding.size());
    if (!is_user_name(name)) return {};  // as of a file that is being made
    if (names.size() == kUserCountMax)
      return key_error(Errc::kMismatch, folder, "it has keys of more than " + std::to_string(kUserCountMax) + " users",
                       "remove those of users who have left");
    names.emplace_back(name);
    return {};
  });
  if (!listed) return listed.error();
  return names;
}

// What the file system says of the public keys. It is another after each change of one.
Result<std::string> stamp_of(int folder_fd, const std::string& folder) {
  std::vector<std::string> stamps;
  auto listed = list_files(folder_fd, folder, [&](std::string_view file) -> Result<void> {
    if (!file.ends_with(".public")) return {};
    const std::string name(file);
    struct stat status {};
    if (::fstatat(folder_fd, name.c_str(), &status, AT_SYMLINK_NOFOLLOW) != 0) return {};  // it has just gone
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

// Names for a sentence, some of many.
std::string spoken_names(const std::vector<std::string>& names) {
  constexpr size_t kSpokenMax = 8;
  std::string text;
  for (size_t place = 0; place < std::min(names.size(), kSpokenMax); ++place)
    text += (place == 0 ? "" : ", ") + names[place];
  return names.size() <= kSpokenMax ? text : text + " and " + std::to_string(names.size() - kSpokenMax) + " more";
}

std::string spoken_change(const std::string& folder, Role own_role, const PublicKeys& before, const PublicKeys& after) {
  std::vector<std::string> added, removed, other_roles;
  for (const auto& [key, user] : after.users)
    if (!before.users.contains(key)) added.push_back(user);
  for (const auto& [key, user] : before.users)
    if (!after.users.contains(key)) removed.push_back(user);
  for (const Role role : kRoles) {
    const auto place = static_cast<size_t>(role);
    if (role != own_role && before.roles[place] != after.roles[place]) other_roles.emplace_back(role_name(role));
  }
  std::string text = "has read the keys in " + folder + " again";
  if (!removed.empty()) text += "; no longer let in: the keys of " + spoken_names(removed);
  if (!added.empty()) text += "; let in from now on: those of " + spoken_names(added);
  if (!other_roles.empty()) text += "; other keys than before stand for: " + spoken_names(other_roles);
  const auto own = static_cast<size_t>(own_role);
  if (before.roles[own] != after.roles[own])
    text += "; the key of this process itself is another one there, which counts when it is started again";
  return text;
}

Result<UserKeys> load_user_keys(int folder_fd, const std::string& folder, const RoleKeys& roles) {
  auto names = user_names(folder_fd, folder);
  if (!names) return names.error();
  UserKeys users;
  for (const std::string& name : names.value()) {
    auto key = load_public(folder_fd, folder, name + std::string(kUserEnding));
    if (!key) return key.error();
    const bool is_of_role = std::find(roles.begin(), roles.end(), key.value()) != roles.end();
    if (is_of_role || !users.emplace(key.value(), name).second)
      return key_error(Errc::kMismatch, folder, "the user " + name + " has the key of a role or of another user",
                       "make keys for each user with penstock keys --user");
  }
  return users;
}

// The user's own folder, which was just made.
Result<void> fill_user_folder(const std::string& user_folder, const RoleKeys& keys, const KeyPair& pair) {
  auto fd = open_folder(user_folder);
  if (!fd) return fd.error();
  NewFiles files(fd.value().get(), user_folder);
  for (size_t place = 0; place < kRoles.size(); ++place) {
    const PublicKey& key = kRoles[place] == Role::kTrainer ? pair.public_key() : keys[place];
    if (auto made = files.add(file_name(kRoles[place], ".public"), with_newline(key.text())); !made)
      return made.error();
  }
  if (auto made = add_secret(files, file_name(Role::kTrainer, ".secret"), pair); !made) return made.error();
  return files.keep();
}

}  // namespace

Result<void> make_key_folder(const std::string& folder) {
  const bool is_new = ::mkdir(folder.c_str(), kFolderMode) == 0;
  if (!is_new && errno != EEXIST) return system_error("making the key folder", folder, errno);
  auto filled = fill_key_folder(folder);
  if (!filled && is_new) ::rmdir(folder.c_str());
  return filled;
}

Result<void> make_user_keys(const std::string& folder, const std::string& user, const std::string& user_folder) {
  if (!is_user_name(user))
    return Fault{Errc::kMalformed, "'" + user + "' cannot name a user; take up to " +
                                       std::to_string(kUserNameBytesMax) +
                                       " letters, digits, '-', '_' and '.', the first of them no '.'"};
  auto fd = open_folder(folder);
  if (!fd) return fd.error();
  auto keys = load_role_keys(fd.value().get(), folder);
  if (!keys) return keys.error();
  const KeyPair pair = KeyPair::generate();
  NewFiles files(fd.value().get(), folder);
  if (auto made = files.add(user + std::string(kUserEnding), with_newline(pair.public_key().text())); !made)
    return made.error();
  if (::mkdir(user_folder.c_str(), kFolderMode) != 0)
    return system_error("making the folder for the user's keys,", user_folder, errno);
  if (auto filled = fill_user_folder(user_folder, keys.value(), pair); !filled) {
    ::rmdir(user_folder.c_str());
    return filled.error();
  }
  return files.keep();
}

Result<KeyRing> load_key_folder(const std::string& folder, Role own_role, KeyOrigin origin) {
  auto fd = open_folder(folder);
  if (!fd) return fd.error();
  const int folder_fd = fd.value().get();
  auto loaded = load_role_keys(folder_fd, folder);
  if (!loaded) return loaded.error();
  const RoleKeys& keys = loaded.value();
  auto own = load_secret(folder_fd, folder, own_role);
  if (!own) return own.error();
  if (own.value().public_key() != keys[static_cast<size_t>(own_role)]) {
    return key_error(Errc::kMismatch, folder,
                     file_name(own_role, ".secret") + " does not belong to " + file_name(own_role, ".public"),
                     "copy both from the folder that penstock keys made");
  }
  auto users = load_user_keys(folder_fd, folder, keys);
  if (!users) return users.error();
  std::error_code unknown;
  const auto path = std::filesystem::absolute(folder, unknown);  // a job may change the process's working folder
  return KeyRing(own_role, std::move(own).value(), keys, origin, std::move(users).value(),
                 unknown ? std::string() : path.string());
}

Result<std::optional<KeyFolderWatch::Change>> KeyFolderWatch::look() {
  auto fd = open_folder(folder_);
  if (!fd) return fd.error();
  const int folder_fd = fd.value().get();
  // Before the files are read: what changes meanwhile is seen the next time.
  auto stamp = stamp_of(folder_fd, folder_);
  if (!stamp) return stamp.error();
  if (stamp.value() == stamp_) return std::optional<Change>();
  auto roles = load_role_keys(folder_fd, folder_);
  if (!roles) return roles.error();
  auto users = load_user_keys(folder_fd, folder_, roles.value());
  if (!users) return users.error();
  stamp_ = std::move(stamp).value();
  PublicKeys keys{.roles = roles.value(), .users = std::move(users).value()};
  if (keys == known_) return std::optional<Change>();
  Change change{.keys = keys, .notice = spoken_change(folder_, own_role_, known_, keys)};
  known_ = std::move(keys);
  return std::optional(std::move(change));
}

std::string warning_of_workers_keys(const std::string& folder) {
  const FileDescriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  std::string others;
  for (const Role role : kRoles) {
    if (!fd || role == Role::kWorker || !has_secret(fd.get(), role)) continue;
    others += (others.empty() ? "" : ", ") + file_name(role, ".secret");
  }
  if (others.empty()) return "";
  return "the key folder " + folder + " has " + others +
         " beside worker.secret, and the datasets that this worker runs can read them and act in these roles; give "
         "workers a folder of their own with worker.secret and the .public files alone";
}

}  // namespace penstock::net
