// SPDX-License-Identifier: Apache-2.0
#pragma once
// A program that this process starts and waits for, regardless of what else the process does: it may ignore SIGCHLD or
// wait for all of its children itself, and may receive signals at any rate. The program is therefore identified by a
// handle (a pidfd) and not by its pid, which may have been reused, and a signal does not shorten a wait: it lasts until
// its deadline.

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "base/result.h"

namespace penstock {

// How a process ended.
struct ProcessEnd {
  // As returned by waitpid(); none if this process has waited for it elsewhere, or ignores SIGCHLD.
  std::optional<int> status{};

  // A phrase that follows the name of a process: "ended with exit code 1", "was ended by SIGKILL, ...".
  std::string spoken() const;
};

// Opens a handle of a process that becomes readable when the process has ended. Empty if the process is gone or the
// system provides no handle; errno has the reason.
FileDescriptor open_process_handle(pid_t pid);

// Thread-compatible. The destructor kills a process that still runs, by SIGKILL.
class ChildProcess {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  struct Settings {
    std::vector<std::string> command{};  // the program, which is searched for on PATH, and its arguments
    int passed_fd = -1;                  // a descriptor that the program inherits under the same number
    bool has_own_session = false;        // Ctrl-C at a terminal does not reach it
  };
  // kFailed with the system's message if it cannot be started.
  static Result<ChildProcess> start(const Settings& settings);

  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess();

  pid_t pid() const { return pid_; }
  // How it ended, once it has ended.
  const std::optional<ProcessEnd>& poll();
  void signal(int number);
  // Waits for its end. Returns false if it still runs at the deadline. Blocks.
  [[nodiscard]] bool wait_until(Deadline deadline);

 private:
  explicit ChildProcess(pid_t pid);
  void end();

  pid_t pid_;
  pid_t owner_pid_;
  FileDescriptor handle_;  // none before Linux 5.3, or where the system refuses one
  std::optional<ProcessEnd> end_;
};

// Reads a line from a pipe byte by byte and returns it without its newline. kClosed if the other end is closed before
// the newline, kTimeout at the deadline. Blocks.
Result<std::string> read_line_until(int fd, ChildProcess::Deadline deadline);

}  // namespace penstock
