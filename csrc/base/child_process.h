// SPDX-License-Identifier: Apache-2.0
#pragma once
// A program that this process starts and waits for, whatever else the process does: it may ignore SIGCHLD or wait for
// all of its children itself, and signals may come at any rate. So the program is known by a handle (a pidfd) and not
// by its number, which another one may have by then, and every wait goes on after a signal until its own deadline.

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "base/result.h"

namespace penstock {

// How a process has ended.
struct ProcessEnd {
  // As waitpid() has it; none where this process has taken it elsewhere, or ignores SIGCHLD.
  std::optional<int> status{};

  // In words that follow the name of a process: "ended with exit code 1", "was ended by SIGKILL, ...".
  std::string spoken() const;
};

// A handle on a process, of which the system tells when the process has ended. None where it is gone, or the system
// gives none, as errno says.
FileDescriptor open_process_handle(pid_t pid);

// Thread-compatible. Destroying it ends a process that still runs, by SIGKILL.
class ChildProcess {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  struct Settings {
    std::vector<std::string> command{};  // the program, which is looked for on PATH, and its arguments
    int passed_fd = -1;                  // a descriptor that it has, too, under the same number
    bool has_own_session = false;        // Ctrl-C at a terminal is not for it
  };
  // kFailed with the system's words where it cannot be started.
  static Result<ChildProcess> start(const Settings& settings);

  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  // How it ended, once it has.
  const std::optional<ProcessEnd>& poll();
  void signal(int number);
  // Waits for its end. False where it still runs at the deadline. Blocks.
  [[nodiscard]] bool wait_until(Deadline deadline);

 private:
  explicit ChildProcess(pid_t pid);
  void end();

  pid_t pid_;
  pid_t owner_pid_;
  FileDescriptor handle_;  // none before Linux 5.3, or where the system lets nobody have one
  std::optional<ProcessEnd> end_;
};

// Reads a line without its end from a pipe, byte by byte. kClosed where the other end is closed before, kTimeout at the
// deadline. Blocks.
Result<std::string> read_line_until(int fd, ChildProcess::Deadline deadline);

}  // namespace penstock
