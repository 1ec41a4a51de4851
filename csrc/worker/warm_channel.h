// SPDX-License-Identifier: Apache-2.0
#pragma once
// The end of a warm process in its server's channel (server/warm_process.h): it is told for which jobs to fork, and
// tells how their processes end. It waits for these by itself, and ends what they have left behind, in whatever
// session: it adopts what a process leaves at its end, and each process of a job adopts what its children leave, so
// that the strays of one job are never among those of another that goes on.

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>

#include "base/file_descriptor.h"
#include "base/result.h"
#include "base/stray_processes.h"
#include "shm/channel.h"
#include "wire/job_record.h"

namespace penstock::worker {

// Confined to the one thread of the warm process.
class WarmChannel {
 public:
  // `socket` is closed in a program that this process starts.
  explicit WarmChannel(FileDescriptor socket);

  // Says that this process can fork: with the numerics of its kernels and its torch, the kinds of jobs that its
  // processes can run (wire::kind_bit), and `about` it for people.
  Result<void> ready(uint8_t job_kinds, const std::string& about);

  // A process is wanted for a job.
  struct Order {
    uint64_t job = 0;
    FileDescriptor channel{};
    FileDescriptor errors{};  // for its standard output and error
    std::string log_name{};
  };
  // The process of a job has ended, and the server knows.
  struct End {
    uint64_t job = 0;
  };
  // The next of them. kClosed once the server is gone, and all processes of jobs with it. Blocks.
  Result<std::variant<Order, End>> next();

  // The process of the job was forked; 0: it could not be.
  Result<void> started(uint64_t job, pid_t pid);

  // In a forked child: the channel is not for it, and what its own children leave is.
  void close_in_child();

 private:
  std::optional<End> reap();
  void end_strays();
  static void end_session(pid_t pid);
  void end_all();
  Result<void> send(const wire::WarmMessage& message);
  void wait();

  shm::Channel channel_;
  std::map<uint64_t, pid_t> processes_;  // by job
  StrayProcesses strays_;
  bool are_strays_left_ = false;  // that have not ended yet
};

}  // namespace penstock::worker
