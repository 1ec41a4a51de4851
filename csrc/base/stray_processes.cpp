// SPDX-License-Identifier: Apache-2.0
#include "base/stray_processes.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/child_process.h"
#include "base/file_descriptor.h"

namespace penstock {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kStrayLook{2};  // between checks of a process without a handle
constexpr const char* kOwnThreads = "/proc/self/task/";

// Returns none if the file cannot be read.
std::optional<std::string> text_of_file(const std::string& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return std::nullopt;
  std::string text;
  for (;;) {
    std::array<char, 4096> piece{};
    const ssize_t count = ::read(file.get(), piece.data(), piece.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return std::nullopt;
    if (count == 0) return text;
    text.append(piece.data(), static_cast<size_t>(count));
  }
}

// The entries of a folder of /proc that are numbers.
std::vector<pid_t> numbers_in(const char* folder) {
  std::vector<pid_t> numbers;
  const std::unique_ptr<DIR, int (*)(DIR*)> open(::opendir(folder), ::closedir);
  if (!open) return numbers;
  while (const dirent* entry = ::readdir(open.get())) {  // NOLINT(concurrency-mt-unsafe): the folder is its own
    const std::string_view name = entry->d_name;
    pid_t number = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
    if (error == std::errc() && end == name.data() + name.size()) numbers.push_back(number);
  }
  return numbers;
}

void add_numbers(std::string_view text, std::vector<pid_t>& numbers) {
  while (!text.empty()) {
    pid_t number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error == std::errc()) numbers.push_back(number);
    text.remove_prefix(std::min(text.size(), static_cast<size_t>(end - text.data()) + 1));
  }
}

// The format of /proc/PID/stat: "PID (NAME) STATE PARENT ...", where NAME may be any text.
pid_t parent_in(std::string_view status) {
  const size_t name_end = status.rfind(')');
  if (name_end == std::string_view::npos || name_end + 4 > status.size()) return -1;
  status.remove_prefix(name_end + 4);
  pid_t parent = -1;
  std::from_chars(status.data(), status.data() + status.size(), parent);
  return parent;
}

enum class ChildState : uint8_t { kNone, kRuns, kHasEnded };

ChildState state_of(idtype_t kind, pid_t pid) {
  siginfo_t info{};
  if (::waitid(kind, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT | __WALL) != 0)
    return ChildState::kNone;
  return info.si_pid != 0 ? ChildState::kHasEnded : ChildState::kRuns;
}

// Waits for a child that was killed. Returns false at the deadline.
bool wait_for_killed(pid_t pid, steady_clock::time_point deadline) {
  const FileDescriptor handle = open_process_handle(pid);
  for (;;) {
    const pid_t waited = ::waitpid(pid, nullptr, WNOHANG | __WALL);
    if (waited == pid || (waited < 0 && errno != EINTR)) return true;
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    if (left.count() <= 0) return false;
    pollfd item{.fd = handle.get(), .events = POLLIN, .revents = 0};
    ::poll(&item, 1, static_cast<int>(handle ? left.count() : kStrayLook.count()));
  }
}

}  // namespace

void adopt_orphans() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

std::vector<pid_t> own_threads() { return numbers_in(kOwnThreads); }

std::vector<pid_t> child_processes() {
  std::vector<pid_t> children;
  if (state_of(P_ALL, 0) == ChildState::kNone) return children;
  if (::access("/proc/thread-self/children", R_OK) == 0) {
    for (const pid_t thread : own_threads())
      add_numbers(text_of_file(kOwnThreads + std::to_string(thread) + "/children").value_or(""), children);
    return children;
  }
  // The kernel was built without these lists.
  const pid_t self = ::getpid();
  for (const pid_t pid : numbers_in("/proc"))
    if (parent_in(text_of_file("/proc/" + std::to_string(pid) + "/stat").value_or("")) == self) children.push_back(pid);
  return children;
}

StrayProcesses::StrayProcesses() {
  adopt_orphans();
  const std::vector<pid_t> children = child_processes();
  kept_.insert(children.begin(), children.end());
}

// The pid of a child that was not waited for is not reused, so the signal cannot reach another process.
bool StrayProcesses::end_all_but(std::span<const pid_t> own, Deadline deadline) {
  std::set<pid_t> kept = kept_;
  kept.insert(own.begin(), own.end());
  for (;;) {
    std::vector<pid_t> strays = child_processes();
    std::erase_if(strays, [&](pid_t pid) { return kept.contains(pid) || state_of(P_PID, pid) == ChildState::kNone; });
    if (strays.empty()) return true;
    for (const pid_t pid : strays)
      if (::kill(pid, SIGKILL) != 0) kept.insert(pid);
    for (const pid_t pid : strays)
      if (!kept.contains(pid) && !wait_for_killed(pid, deadline)) return false;
  }
}

void forget_ended_children(size_t kept) {
  if (state_of(P_ALL, 0) != ChildState::kHasEnded) return;
  std::vector<pid_t> ended = child_processes();
  std::erase_if(ended, [](pid_t pid) { return state_of(P_PID, pid) != ChildState::kHasEnded; });
  for (size_t place = 0; place + kept < ended.size(); ++place) ::waitpid(ended[place], nullptr, WNOHANG | __WALL);
}

}  // namespace penstock
