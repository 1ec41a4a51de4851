// SPDX-License-Identifier: Apache-2.0
#include "net/key_folder.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <new>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "net/key_files.h"

namespace penstock::net {
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
std::string spoken_names(const std::vector<std::string>& names) {
  constexpr size_t kSpokenMax = 8;
  std::string text;
  for (size_t place = 0; place < std::min(names.size(), kSpokenMax); ++place)
    text += (place == 0 ? "" : ", ") + names[place];
  return names.size() <= kSpokenMax ? text : text + " and " + std::to_string(names.size() - kSpokenMax) + " more";
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

std::string spoken_change(const std::string& folder, Role own_role, const PublicKeys& before, const PublicKeys& after) {
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
  if (!removed.empty()) text += "; no longer accepted: the keys of " + spoken_names(removed);
  if (!added.empty()) text += "; now accepted: the keys of " + spoken_names(added);
  if (!other_roles.empty()) text += "; changed keys: " + spoken_names(other_roles);
  if (!retained.empty()) text += "; the former keys are also accepted for: " + spoken_names(retained);
  if (!retired.empty()) text += "; the former keys are no longer accepted for: " + spoken_names(retired);
  const auto own = static_cast<size_t>(own_role);
  if (before.roles[own] != after.roles[own])
    text += "; the key of this process has changed there, which takes effect when the process is restarted";
  return text;
}

}  // namespace

Result<KeyRing> load_key_folder(const std::string& folder, Role own_role, KeyOrigin origin) {
  auto fd = open_key_folder(folder);
  if (!fd) return fd.error();
  const int folder_fd = fd.value().get();
  auto keys = load_public_keys(folder_fd, folder);
  if (!keys) return keys.error();
  auto own = load_secret(folder_fd, folder, own_role);
  if (!own) return own.error();
  if (!keys.value().lets_in(own.value().public_key(), own_role)) return no_key_pair(folder, own_role);
  std::error_code unknown;
  const auto path = std::filesystem::absolute(folder, unknown);  // a job may change the process's working folder
  return KeyRing(own_role, std::move(own).value(), std::move(keys).value(), origin,
                 unknown ? std::string() : path.string());
}

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
  Change change{.keys = keys, .notice = spoken_change(folder_, own_role_, known_, keys)};
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
  if (asked_at_ && now - *asked_at_ < kKeyReadInterval) return;
  {
    const MutexLock lock(state_->mutex);
    if (std::exchange(state_->is_reading, true)) return;
  }
  asked_at_ = now;
  try {
    std::thread([state = state_] {
      ::pthread_setname_np(::pthread_self(), "pk_key_read");
      // Signals are for the program's threads.
      sigset_t all;
      ::sigfillset(&all);
      ::pthread_sigmask(SIG_BLOCK, &all, nullptr);
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

}  // namespace penstock::net
