// SPDX-License-Identifier: Apache-2.0
#pragma once
// The process from which a server forks those of jobs: it has imported what every job needs, and runs nobody's code.
// It is the parent of the jobs' processes, so it alone can tell how one ended, whatever the dataset in it did.

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

// What a warm process says of itself once it can fork.
struct WarmFacts {
  Numerics numerics{};  // of its kernels
  uint16_t torch = 0;   // as wire::torch_number()
  uint8_t job_kinds{};  // that its processes can run
  std::string about{};  // for people
};

// Confined to one thread at a time.
class WarmProcess {
 public:
  // Starts it. `command` gets one more argument: the number of the channel's descriptor.
  static Result<std::unique_ptr<WarmProcess>> start(std::vector<std::string> command);

  WarmProcess(ChildProcess process, shm::Channel channel);
  WarmProcess(const WarmProcess&) = delete;
  WarmProcess& operator=(const WarmProcess&) = delete;
  // Has it end the processes of its jobs and then itself, and kills it where it does not.
  ~WarmProcess();

  pid_t pid() const { return process_.pid(); }
  // Readable when it has said something, or has ended.
  int fd() const { return channel_.fd(); }

  // Waits for it to be ready. kTimeout at the deadline, kClosed with how it ended. Blocks.
  Result<WarmFacts> wait_until_ready(std::chrono::steady_clock::time_point deadline);

  // Has it fork a process for the job, which gets `channel`, and `errors` to write its output to. Its news says
  // what became of it.
  Result<void> fork(uint64_t job, int channel, int errors, const std::string& log_name);
  // Has it end the process of the job at once, with all that this has started in its session.
  Result<void> end(uint64_t job);

  // The next news, kStarted or kEnded; nothing where there is none. kClosed with how it ended once it has.
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
