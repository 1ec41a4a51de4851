// SPDX-License-Identifier: Apache-2.0
#include "api/child_process.h"

#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <utility>

extern "C" char** environ;  // NOLINT(readability-redundant-declaration)

namespace penstock::api {

Result<ChildProcess> ChildProcess::start(const Settings& settings) {
  std::vector<char*> arguments;
  for (const std::string& argument : settings.command) arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  // Onto itself: which drops the mark that closes it.
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

ChildProcess::ChildProcess(pid_t pid) : pid_(pid), owner_pid_(::getpid()) {}
ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), owner_pid_(other.owner_pid_), status_(other.status_) {}
ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  if (this == &other) return *this;
  end();
  pid_ = std::exchange(other.pid_, -1);
  owner_pid_ = other.owner_pid_;
  status_ = other.status_;
  return *this;
}
ChildProcess::~ChildProcess() { end(); }

// In a forked child the process is that of its parent.
void ChildProcess::end() {
  if (pid_ < 0 || owner_pid_ != ::getpid() || poll()) return;
  ::kill(pid_, SIGKILL);
  wait();
}

std::optional<int> ChildProcess::poll() {
  int status = 0;
  if (!status_ && pid_ >= 0 && ::waitpid(pid_, &status, WNOHANG) == pid_) status_ = status;
  return status_;
}

void ChildProcess::signal(int number) {
  if (pid_ >= 0 && !status_) ::kill(pid_, number);
}

void ChildProcess::wait() {
  int status = 0;
  while (!status_ && pid_ >= 0) {
    const pid_t ended = ::waitpid(pid_, &status, 0);
    if (ended == pid_) status_ = status;
    if (ended < 0 && errno != EINTR) return;  // somebody else has waited for it
  }
}

std::string spoken_end(int status) {
  if (WIFEXITED(status)) return "ended with exit code " + std::to_string(WEXITSTATUS(status));
  const int number = WTERMSIG(status);
  const char* name = ::sigabbrev_np(number);
  std::string text = "was ended by SIG" + std::string(name != nullptr ? name : std::to_string(number));
  if (number == SIGKILL) text += ", as the system does when memory runs out";
  return text;
}

}  // namespace penstock::api
