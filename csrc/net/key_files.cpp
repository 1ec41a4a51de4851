// SPDX-License-Identifier: Apache-2.0
#include "net/key_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstring>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace penstock::net {
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

Fault key_error(Errc code, const std::string& path, const std::string& seen, const std::string& remedy) {
  return {code, "the keys in " + path + " cannot be used: " + seen + "; " + remedy};
}

Fault key_system_error(const std::string& what, const std::string& path, int error_number) {
  const std::string remedy = error_number == ENOENT ? "; create keys with penstock keys, or correct the path" : "";
  return {Errc::kFailed, what + " " + path + " failed: " + std::strerror(error_number) + remedy};
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

}  // namespace penstock::net
