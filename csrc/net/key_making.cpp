// SPDX-License-Identifier: Apache-2.0
#include "net/key_making.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "net/key_folder.h"
#include "net/keys.h"

namespace penstock::net {
namespace {

constexpr mode_t kFolderMode = 0700;
constexpr mode_t kFileMode = 0600;

Result<void> sync_folder(int folder_fd, const std::string& folder) {
  if (::fsync(folder_fd) != 0) return key_system_error("writing the folder", folder, errno);
  return {};
}

Result<void> write_whole(int fd, std::string_view text, const std::string& path) {
  while (!text.empty()) {
    const ssize_t count = ::write(fd, text.data(), text.size());
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return key_system_error("writing the key", path, errno);
    text.remove_prefix(static_cast<size_t>(count));
  }
  return {};
}

// The files of one command. The destructor removes files that are not kept or still have their temporary names.
class NewFiles {
 public:
  NewFiles(int folder_fd, const std::string& folder) : folder_fd_(folder_fd), folder_(folder) {}
  NewFiles(const NewFiles&) = delete;
  NewFiles& operator=(const NewFiles&) = delete;
  ~NewFiles() {
    for (const auto& name : names_) ::unlinkat(folder_fd_, name.c_str(), 0);
  }

  // Writes the file completely and syncs it, under a temporary name.
  Result<void> write_aside(const std::string& name, std::string_view text) {
    const std::string path = folder_ + "/" + name;
    const std::string aside = aside_of(name);
    const FileDescriptor fd(
        ::openat(folder_fd_, aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kFileMode));
    if (!fd) return key_system_error("creating the key", path, errno);
    names_.push_back(aside);
    if (auto written = write_whole(fd.get(), text, path); !written) return written.error();
    if (::fsync(fd.get()) != 0) return key_system_error("writing the key", path, errno);
    return {};
  }

  // Creates the file completely written and synced, or not at all.
  Result<void> add(const std::string& name, std::string_view text) {
    if (auto written = write_aside(name, text); !written) return written;
    if (!try_rename(aside_of(name), name)) {
      if (errno == EEXIST) return already_there(folder_ + "/" + name);
      return key_system_error("creating the key", folder_ + "/" + name, errno);
    }
    names_.back() = name;
    return {};
  }

  // Replaces the existing file by the temporary one, permanently. The folder is synced afterwards.
  Result<void> replace(const std::string& name) {
    if (::renameat(folder_fd_, aside_of(name).c_str(), folder_fd_, name.c_str()) != 0)
      return key_system_error("replacing the key", folder_ + "/" + name, errno);
    std::erase(names_, aside_of(name));
    return sync();
  }

  Result<void> keep() {
    if (auto synced = sync(); !synced) return synced;
    names_.clear();
    return {};
  }

  static Fault already_there(const std::string& path) {
    return {Errc::kMismatch, "creating keys failed: " + path +
                                 " already exists, and an overwritten key cannot be recovered; pass another folder, or "
                                 "move the old keys away"};
  }

 private:
  static std::string aside_of(const std::string& name) { return "." + name + "." + std::to_string(::getpid()); }

  Result<void> sync() const { return sync_folder(folder_fd_, folder_); }

  bool try_rename(const std::string& aside, const std::string& name) const {
    if (::renameat2(folder_fd_, aside.c_str(), folder_fd_, name.c_str(), RENAME_NOREPLACE) == 0) return true;
    if (errno != EINVAL && errno != ENOSYS) return false;
    // On a file system without RENAME_NOREPLACE: the names were checked before.
    return ::renameat(folder_fd_, aside.c_str(), folder_fd_, name.c_str()) == 0;
  }

  int folder_fd_;
  std::string folder_;
  std::vector<std::string> names_;
};

KeyFileText secret_file(const KeyPair& pair) {
  KeyFileText secret;
  const SecretText text = pair.secret_text();
  text.text().copy(secret.characters().data(), kKeyTextLength);
  secret.characters()[kKeyTextLength] = '\n';
  return secret;
}

std::string public_file(const PublicKey& key) { return key.text() + '\n'; }

Result<void> fill_key_folder(const std::string& folder) {
  auto fd = open_key_folder(folder);
  if (!fd) return fd.error();
  const int folder_fd = fd.value().get();
  for (const Role role : kRoles) {
    for (const auto* kind : {".public", ".secret"}) {
      const std::string name = key_file_name(role, kind);
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
    if (auto made = files.add(key_file_name(role, ".secret"), secret_file(pair).text()); !made) return made;
    if (auto made = files.add(key_file_name(role, ".public"), public_file(pair.public_key())); !made) return made;
  }
  return files.keep();
}

// ---- Keys for users and machines

// Adds the keys of the roles, except `left_out`, whose place another key takes.
Result<void> add_role_keys(NewFiles& files, const PublicKeys& keys, std::optional<Role> left_out = {}) {
  for (const Role role : kRoles) {
    if (role == left_out) continue;
    const auto place = static_cast<size_t>(role);
    if (auto made = files.add(key_file_name(role, ".public"), public_file(keys.roles[place])); !made) return made;
    if (!keys.former[place]) continue;
    if (auto made = files.add(key_file_name(role, kFormerEnding), public_file(*keys.former[place])); !made) return made;
  }
  return {};
}

Result<void> fill_user_folder(NewFiles& files, const PublicKeys& keys, const KeyPair& pair) {
  if (auto made = add_role_keys(files, keys, Role::kTrainer); !made) return made;
  if (auto made = files.add(key_file_name(Role::kTrainer, ".public"), public_file(pair.public_key())); !made)
    return made;
  return files.add(key_file_name(Role::kTrainer, ".secret"), secret_file(pair).text());
}

// The machine's workers admit users, and show a key that is not a role's.
Result<void> fill_machine_folder(NewFiles& files, const PublicKeys& keys, const KeyPair& pair,
                                 const std::string& machine) {
  if (auto made = add_role_keys(files, keys); !made) return made;
  for (const auto& [key, user] : keys.users) {
    if (auto made = files.add(user + std::string(kUserHolders.ending), public_file(key)); !made) return made;
  }
  if (auto made = files.add(machine + std::string(kMachineHolders.ending), public_file(pair.public_key())); !made)
    return made;
  return files.add(key_file_name(Role::kWorker, ".secret"), secret_file(pair).text());
}

Result<void> check_key_name(const Holders& holders, const std::string& name) {
  if (is_key_name(name)) return {};
  return Fault{Errc::kMalformed, "'" + name + "' is not a valid name of a " + std::string(holders.what) +
                                     "; use up to " + std::to_string(kKeyNameBytesMax) +
                                     " letters, digits, '-', '_' and '.', but no leading '.'"};
}

// Creates a pair for `name`, its public key in the pool's folder, and the holder's folder, by
// `fill(files, keys of the pool, pair)`.
template <typename Fill>
Result<void> make_holder(const Holders& holders, const std::string& folder, const std::string& name,
                         const std::string& own_folder, const Fill& fill) {
  if (auto checked = check_key_name(holders, name); !checked) return checked;
  auto fd = open_key_folder(folder);
  if (!fd) return fd.error();
  auto keys = load_public_keys(fd.value().get(), folder);
  if (!keys) return keys.error();
  const KeyPair pair = KeyPair::generate();
  NewFiles files(fd.value().get(), folder);
  if (auto made = files.add(name + std::string(holders.ending), public_file(pair.public_key())); !made) return made;
  if (::mkdir(own_folder.c_str(), kFolderMode) != 0)
    return key_system_error("creating the folder for the " + std::string(holders.what) + "'s keys,", own_folder, errno);
  auto filled = [&]() -> Result<void> {
    auto own_fd = open_key_folder(own_folder);
    if (!own_fd) return own_fd.error();
    NewFiles own_files(own_fd.value().get(), own_folder);
    if (auto added = fill(own_files, keys.value(), pair); !added) return added;
    return own_files.keep();
  }();
  if (!filled) {
    ::rmdir(own_folder.c_str());
    return filled;
  }
  return files.keep();
}

// ---- Rotation

// Two commands at the same time would mix their pairs. The lock is released with the descriptor.
Result<void> lock_folder(int folder_fd, const std::string& folder) {
  if (::flock(folder_fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return {};  // or the file system has no locks
  return Fault{Errc::kMismatch,
               "the keys in " + folder +
                   " cannot be rotated: another penstock keys process is changing them; wait until it has ended"};
}

// Removes the temporary files of interrupted rotations. Their secrets are not in use.
Result<void> remove_left_aside(int folder_fd, const std::string& folder) {
  std::vector<std::string> left;
  auto listed = list_key_files(folder_fd, folder, [&](std::string_view file) -> Result<void> {
    for (const Role role : kRoles)
      for (const std::string_view kind : {std::string_view(".public"), std::string_view(".secret"), kFormerEnding})
        if (file.starts_with("." + key_file_name(role, kind) + ".")) left.emplace_back(file);
    return {};
  });
  if (!listed) return listed;
  for (const std::string& name : left) ::unlinkat(folder_fd, name.c_str(), 0);
  return {};
}

// The roles whose rotation has yet to start or to be completed. An error if there is none.
Result<std::vector<Role>> roles_to_rotate(int folder_fd, const std::string& folder, const PublicKeys& keys) {
  std::vector<Role> left;
  size_t former_count = 0;
  bool is_begun = false;
  for (const Role role : kRoles) {
    const auto place = static_cast<size_t>(role);
    if (!has_secret(folder_fd, role))
      return key_error(
          Errc::kMismatch, folder, "it has no " + key_file_name(role, ".secret"),
          "rotate the keys in the folder created by penstock keys, which contains the secrets of all roles");
    auto own = load_secret(folder_fd, folder, role);
    if (!own) return own.error();
    const bool is_newest = own.value().public_key() == keys.roles[place];
    if (!is_newest && keys.former[place] != own.value().public_key()) return no_key_pair(folder, role);
    if (!is_newest || !keys.former[place]) left.push_back(role);
    is_begun = is_begun || keys.former[place];
    former_count += has_key_file(folder_fd, key_file_name(role, kFormerEnding)) ? 1 : 0;
  }
  // If some of the former keys are missing, an interrupted end of a rotation left this state.
  if (is_begun && (left.empty() || former_count < kRoles.size()))
    return Fault{Errc::kMismatch,
                 "the keys in " + folder +
                     " cannot be rotated: the keys from before the last rotation are still accepted; restart the "
                     "processes that use them with the new ones, and then run penstock keys " +
                     folder + " --finish"};
  return left;
}

}  // namespace

Result<void> make_key_folder(const std::string& folder) {
  const bool is_new = ::mkdir(folder.c_str(), kFolderMode) == 0;
  if (!is_new && errno != EEXIST) return key_system_error("creating the key folder", folder, errno);
  auto filled = fill_key_folder(folder);
  if (!filled && is_new) ::rmdir(folder.c_str());
  return filled;
}

Result<void> make_user_keys(const std::string& folder, const std::string& user, const std::string& user_folder) {
  return make_holder(kUserHolders, folder, user, user_folder, fill_user_folder);
}

Result<void> make_machine_keys(const std::string& folder, const std::string& machine,
                               const std::string& machine_folder) {
  return make_holder(kMachineHolders, folder, machine, machine_folder,
                     [&machine](NewFiles& files, const PublicKeys& keys, const KeyPair& pair) {
                       return fill_machine_folder(files, keys, pair, machine);
                     });
}

// All files are written before the first is renamed. The former keys are first: as long as they equal the present keys,
// they have no effect. A role's public key is replaced before its secret: in between, the secret belongs to the former
// key, which is admitted. In the other order the key of the new secret would not be known anywhere.
Result<void> rotate_keys(const std::string& folder) {
  auto fd = open_key_folder(folder);
  if (!fd) return fd.error();
  const int folder_fd = fd.value().get();
  if (auto locked = lock_folder(folder_fd, folder); !locked) return locked;
  auto keys = load_public_keys(folder_fd, folder);
  if (!keys) return keys.error();
  auto roles = roles_to_rotate(folder_fd, folder, keys.value());
  if (!roles) return roles.error();
  if (auto removed = remove_left_aside(folder_fd, folder); !removed) return removed;
  NewFiles files(folder_fd, folder);
  std::vector<std::string> in_order;
  const auto write = [&](const std::string& name, std::string_view text) {
    in_order.push_back(name);
    return files.write_aside(name, text);
  };
  for (const Role role : roles.value()) {
    const auto place = static_cast<size_t>(role);
    if (keys.value().former[place]) continue;  // from the interrupted call
    if (auto made = write(key_file_name(role, kFormerEnding), public_file(keys.value().roles[place])); !made)
      return made;
  }
  for (const Role role : roles.value()) {
    const KeyPair pair = KeyPair::generate();
    if (auto made = write(key_file_name(role, ".public"), public_file(pair.public_key())); !made) return made;
    if (auto made = write(key_file_name(role, ".secret"), secret_file(pair).text()); !made) return made;
  }
  for (const std::string& name : in_order) {
    if (auto replaced = files.replace(name); !replaced)
      return Fault{replaced.error().code, replaced.error().message +
                                              "; the folder is still usable: run penstock keys " + folder +
                                              " --rotate again to complete the rotation"};
  }
  return {};
}

Result<void> finish_rotation(const std::string& folder) {
  auto fd = open_key_folder(folder);
  if (!fd) return fd.error();
  const int folder_fd = fd.value().get();
  if (auto locked = lock_folder(folder_fd, folder); !locked) return locked;
  auto keys = load_public_keys(folder_fd, folder);
  if (!keys) return keys.error();
  const std::string hint =
      "; copy the new one there, or complete an interrupted rotation with penstock keys " + folder + " --rotate";
  std::vector<std::string> formers;
  for (const Role role : kRoles) {
    const std::string name = key_file_name(role, kFormerEnding);
    const auto& former = keys.value().former[static_cast<size_t>(role)];
    if (!has_key_file(folder_fd, name)) continue;
    formers.push_back(name);
    if (!former)
      return Fault{Errc::kMismatch, "the former keys in " + folder + " are still needed: " +
                                        key_file_name(role, ".public") + " is still the former one" + hint};
    if (!has_secret(folder_fd, role)) continue;
    auto own = load_secret(folder_fd, folder, role);
    if (!own) return own.error();
    if (own.value().public_key() == *former)
      return Fault{Errc::kMismatch, "the former keys in " + folder + " are still needed: " +
                                        key_file_name(role, ".secret") + " belongs to the former one" + hint};
  }
  if (formers.empty())
    return Fault{Errc::kMismatch, "there is no rotation to finish in " + folder +
                                      ": it has no former keys; they exist only after penstock keys " + folder +
                                      " --rotate"};
  for (const std::string& name : formers) {
    if (::unlinkat(folder_fd, name.c_str(), 0) != 0)
      return key_system_error("removing the former key", folder + "/" + name, errno);
  }
  return sync_folder(folder_fd, folder);
}

}  // namespace penstock::net
