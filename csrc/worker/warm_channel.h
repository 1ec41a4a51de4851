// SPDX-License-Identifier: Apache-2.0
#pragma once
// The warm process's end of the channel to its server (server/warm_process.h): it receives the jobs to fork for, and
// reports how their processes end. It reaps these itself and ends the processes they left behind, in any session: it
// adopts the orphans of a job process that ends, and each job process adopts the orphans of its children, so the strays
// of one job are never mixed with the strays of a job that is still running.

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>

#include "base/child_process.h"
#include "base/file_descriptor.h"
#include "base/result.h"
#include "shm/channel.h"
#include "wire/job_record.h"

namespace penstock::worker {

// Confined to the one thread of the warm process.
class WarmChannel {
 public:
  // `socket` is closed in a program that this process starts.
  explicit WarmChannel(FileDescriptor socket);

  // Reports that this process can fork, with the numerics of its kernels and its torch, the kinds of jobs that its
  // processes can run (wire::kind_bit), and the human-readable `about`.
  Result<void> ready(uint8_t job_kinds, const std::string& about);

  // A job needs a process.
  struct Order {
    uint64_t job = 0;
    FileDescriptor channel{};
    FileDescriptor errors{};  // for its standard output and error
    std::string log_name{};
  };
  // The process of a job has ended, and the server has been notified.
  struct End {
    uint64_t job = 0;
  };
  // The next order or end. kClosed once the server is gone and all job processes have ended. Blocks.
  Result<std::variant<Order, End>> next();

  // The process of the job was forked; 0: the fork failed.
  Result<void> started(uint64_t job, pid_t pid);

  // Call in a forked child: it closes the channel there, and the child adopts the orphans of its own children.
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
  bool are_strays_left_ = false;  // strays that have not ended yet
};

}  // namespace penstock::worker
