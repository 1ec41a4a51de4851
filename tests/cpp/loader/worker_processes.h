// SPDX-License-Identifier: Apache-2.0
#pragma once
// Worker processes of stream_worker_main, and waiting for a process without polling.

#include <poll.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/file_descriptor.h"

namespace penstock::test {

struct WorkerArguments {
  int channel_fd = -1;  // of this process; the worker has it under the same number
  uint32_t worker_id = 0;
  uint32_t prefetch_factor = 2;
  uint64_t arena_bytes = 8 << 20;
  uint64_t file_bytes_max = 0;  // no file of the worker may grow beyond this; 0: no limit
};

// Starts a program that lies beside the tests, with `output_fd` as its standard output and `passed_fd`, if there is
// one, under its own number. Returns its process id.
inline pid_t spawn_program(const std::string& name, std::vector<std::string> arguments, int output_fd = STDOUT_FILENO,
                           int passed_fd = -1) {
  const std::string path = std::string(PENSTOCK_TEST_BINARY_DIR) + "/" + name;
  arguments.insert(arguments.begin(), path);
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, output_fd, STDOUT_FILENO);
  // Onto itself: which drops the mark that closes it.
  if (passed_fd >= 0) ::posix_spawn_file_actions_adddup2(&actions, passed_fd, passed_fd);
  pid_t pid = -1;
  const int failure = ::posix_spawn(&pid, path.c_str(), &actions, nullptr, pointers.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  return failure == 0 ? pid : -1;
}

inline pid_t spawn_worker(const WorkerArguments& arguments) {
  return spawn_program("stream_worker_main",
                       {std::to_string(arguments.channel_fd), std::to_string(arguments.prefetch_factor),
                        std::to_string(arguments.arena_bytes), std::to_string(arguments.file_bytes_max)},
                       STDOUT_FILENO, arguments.channel_fd);
}

// Starts worker `arguments.worker_id` of a client, or of a source of one, which has not started yet.
template <typename Client>
pid_t start_worker(Client& client, WorkerArguments arguments) {
  const auto ends = client.open_channel(arguments.worker_id);
  if (!ends) return -1;
  arguments.channel_fd = ends.value().worker;
  const pid_t pid = spawn_worker(arguments);
  return pid > 0 && client.note_started(arguments.worker_id, pid) ? pid : -1;
}

// The wait status of a child (or an orphan that came to this process) that ends within `patience`. Blocks.
inline std::optional<int> wait_for_exit(pid_t pid, std::chrono::milliseconds patience) {
  const FileDescriptor pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  pollfd item{.fd = pidfd.get(), .events = POLLIN, .revents = 0};
  if (::poll(&item, 1, static_cast<int>(patience.count())) != 1) return std::nullopt;
  int status = 0;
  return ::waitpid(pid, &status, 0) == pid ? std::optional(status) : std::nullopt;
}

// In words: "exit 0", "signal 9", "still running".
inline std::string how_it_ended(std::optional<int> status) {
  if (!status) return "still running";
  if (WIFSIGNALED(*status)) return "signal " + std::to_string(WTERMSIG(*status));
  return "exit " + std::to_string(WEXITSTATUS(*status));
}

}  // namespace penstock::test
