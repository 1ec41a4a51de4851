// SPDX-License-Identifier: Apache-2.0
#pragma once
// A program that this process starts and waits for.

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "base/result.h"

namespace penstock::api {

// Thread-compatible. Destroying it ends a process that still runs, by SIGKILL.
class ChildProcess {
 public:
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
  // How it ended, once it has, as waitpid() says it.
  std::optional<int> poll();
  void signal(int number);
  // Waits for its end.
  void wait();

 private:
  explicit ChildProcess(pid_t pid);
  void end();

  pid_t pid_;
  pid_t owner_pid_;
  std::optional<int> status_;
};

// In words that follow the name of a process: "ended with exit code 1", "was ended by SIGKILL, ...".
std::string spoken_end(int status);

}  // namespace penstock::api
