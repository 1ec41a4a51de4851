// SPDX-License-Identifier: Apache-2.0
#include "base/child_process.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <thread>
#include <utility>

extern "C" char** environ;  // NOLINT(readability-redundant-declaration)

namespace penstock {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr auto kKilledMax = std::chrono::seconds(5);   // a process that waits for a dead disk cannot be killed
constexpr milliseconds kLookInterval{2};               // between checks of a process without a handle
constexpr auto kPidHandle = static_cast<idtype_t>(3);  // P_PIDFD, which older headers lack

// The status as waitpid() would return it.
int status_of(const siginfo_t& info) {
  if (info.si_code == CLD_EXITED) return W_EXITCODE(info.si_status, 0);
  return W_EXITCODE(0, info.si_status) | (info.si_code == CLD_DUMPED ? WCOREFLAG : 0);
}

// Waits until `fd` is readable. Returns false at the deadline.
bool wait_readable_until(int fd, steady_clock::time_point deadline) {
  for (;;) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    pollfd item{.fd = fd, .events = POLLIN, .revents = 0};
    if (::poll(&item, 1, static_cast<int>(std::clamp<int64_t>(left.count(), 0, 1'000'000))) > 0) return true;
    if (left.count() <= 0) return false;  // a signal does not end the wait
  }
}

}  // namespace

std::string ProcessEnd::spoken() const {
  if (!status) return "ended (exit status unknown: this program ignores SIGCHLD, or waits for its children itself)";
  if (WIFEXITED(*status)) return "ended with exit code " + std::to_string(WEXITSTATUS(*status));
  const int number = WTERMSIG(*status);
  const char* name = ::sigabbrev_np(number);
  std::string text = "was ended by SIG" + std::string(name != nullptr ? name : std::to_string(number));
  if (number == SIGKILL) text += ", as the system does when memory runs out";
  return text;
}

Result<ChildProcess> ChildProcess::start(const Settings& settings) {
  std::vector<char*> arguments;
  for (const std::string& argument : settings.command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  // Duplicating it onto itself clears its close-on-exec flag.
  if (settings.passed_fd >= 0) ::posix_spawn_file_actions_adddup2(&actions, settings.passed_fd, settings.passed_fd);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t none;
  sigset_t all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  short flags = POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF;
  if (settings.has_own_session) flags |= POSIX_SPAWN_SETSID;
  ::posix_spawnattr_setflags(&attributes, flags);
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, arguments[0], &actions, &attributes, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (error != 0) return Fault{Errc::kFailed, settings.command[0] + " cannot be started: " + std::strerror(error)};
  return ChildProcess(pid);
}

FileDescriptor open_process_handle(pid_t pid) {
  return FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
}

// The pid cannot be reused before the handle is open: pids are assigned in sequence.
ChildProcess::ChildProcess(pid_t pid) : pid_(pid), owner_pid_(::getpid()), handle_(open_process_handle(pid)) {}
ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)),
      owner_pid_(other.owner_pid_),
      handle_(std::move(other.handle_)),
      end_(other.end_) {}
ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  if (this == &other) return *this;
  end();
  pid_ = std::exchange(other.pid_, -1);
  owner_pid_ = other.owner_pid_;
  handle_ = std::move(other.handle_);
  end_ = other.end_;
  return *this;
}
ChildProcess::~ChildProcess() { end(); }

// In a forked child the process belongs to the parent.
void ChildProcess::end() {
  if (pid_ < 0 || owner_pid_ != ::getpid() || poll()) return;
  signal(SIGKILL);
  static_cast<void>(wait_until(steady_clock::now() + kKilledMax));
}

const std::optional<ProcessEnd>& ChildProcess::poll() {
  if (end_ || pid_ < 0) return end_;
  siginfo_t info{};
  int waited = handle_ ? ::waitid(kPidHandle, static_cast<id_t>(handle_.get()), &info, WEXITED | WNOHANG) : -1;
  if (waited != 0 && (!handle_ || errno == EINVAL))  // Linux 5.3 creates handles, but cannot wait for them
    waited = ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOHANG);
  if (waited == 0 && info.si_pid != 0) end_ = ProcessEnd{.status = status_of(info)};
  if (waited != 0 && errno == ECHILD) end_ = ProcessEnd{};
  return end_;
}

void ChildProcess::signal(int number) {
  if (pid_ < 0 || poll()) return;
  if (handle_ && ::syscall(SYS_pidfd_send_signal, handle_.get(), number, nullptr, 0) == 0) return;
  // Without a handle: a child that was not waited for yet keeps its pid.
  if (!handle_ || errno == ENOSYS || errno == EPERM) ::kill(pid_, number);
}

bool ChildProcess::wait_until(Deadline deadline) {
  while (!poll()) {
    if (steady_clock::now() >= deadline) return false;
    if (handle_) {
      static_cast<void>(wait_readable_until(handle_.get(), deadline));
    } else {
      std::this_thread::sleep_until(std::min(deadline, steady_clock::now() + kLookInterval));
    }
  }
  return true;
}

Result<std::string> read_line_until(int fd, ChildProcess::Deadline deadline) {
  std::string line;
  while (wait_readable_until(fd, deadline)) {
    char c = 0;
    const ssize_t count = ::read(fd, &c, 1);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0)
      return Fault{Errc::kClosed, "the other end of a pipe was closed before a complete line was received"};
    if (c == '\n') return line;
    line += c;
  }
  return Fault{Errc::kTimeout, "no line was received from a pipe before the deadline"};
}

}  // namespace penstock
