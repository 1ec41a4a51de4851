// SPDX-License-Identifier: Apache-2.0
#pragma once
// The process from which a server forks job processes: it has imported the modules that every job needs, and runs no
// user code. It is the parent of the job processes, so only it can report how one ended, regardless of the actions of
// the dataset.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/child_process.h"
#include "base/numerics.h"
#include "base/result.h"
#include "shm/channel.h"
#include "wire/job_record.h"

namespace penstock::server {

// The facts that a warm process reports once it can fork.
struct WarmFacts {
  Numerics numerics{};  // of its kernels
  uint16_t torch = 0;   // as wire::torch_number()
  uint8_t job_kinds{};  // that its processes can run
  std::string about{};  // human-readable
};

// Confined to one thread at a time.
class WarmProcess {
 public:
  // Starts the process. `command` gets one more argument: the number of the channel's descriptor.
  static Result<std::unique_ptr<WarmProcess>> start(std::vector<std::string> command);

  WarmProcess(ChildProcess process, shm::Channel channel);
  WarmProcess(const WarmProcess&) = delete;
  WarmProcess& operator=(const WarmProcess&) = delete;
  // Makes it end the processes of its jobs and then itself, and kills it if it does not.
  ~WarmProcess();

  pid_t pid() const { return process_.pid(); }
  // Readable when it has sent a message, or has ended.
  int fd() const { return channel_.fd(); }

  // Waits until it is ready. kTimeout at the deadline, kClosed with how it ended. Blocks.
  Result<WarmFacts> wait_until_ready(std::chrono::steady_clock::time_point deadline);

  // Makes it fork a process for the job, which gets `channel`, and `errors` to write its output to. The outcome is
  // reported as news.
  Result<void> fork(uint64_t job, int channel, int errors, const std::string& log_name);
  // Makes it end the process of the job immediately, with all processes in its session.
  Result<void> end(uint64_t job);

  // The next news, kStarted or kEnded; empty if there is none. kClosed with how it ended once it has.
  struct News {
    wire::WarmMessage::Kind kind{};
    uint64_t job = 0;
    pid_t pid = 0;
    int status = 0;
  };
  Result<std::optional<News>> next_news();

 private:
  Fault ended();
  Result<void> send(const wire::WarmMessage& message, std::span<const int> fds = {});

  ChildProcess process_;
  shm::Channel channel_;
};

}  // namespace penstock::server
