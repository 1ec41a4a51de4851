// SPDX-License-Identifier: Apache-2.0
#pragma once
// The process that a worker ends with (WatchedProcess), and the time that a worker has to end by itself (OrphanGrace).

#include <sys/types.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <optional>

#include "base/file_descriptor.h"

namespace penstock::server {

// The process that a worker ends with: its trainer, or the process that started it for a pool. Thread-safe.
class WatchedProcess {
 public:
  // `pid` is the parent of this process or, if a fork server made this process, any other one. 0: the parent.
  explicit WatchedProcess(pid_t pid);

  // True also for a process that has ended and has not been reaped yet.
  bool is_gone() const;

 private:
  pid_t pid_;
  bool is_parent_;
  FileDescriptor handle_;  // of a process that is not the parent, unless it was already gone or handles are unavailable
};

// The time in which a worker's main thread must notice the parent's death and exit by itself. The dataset may keep it
// from noticing; the watching thread then ends the process. Confined to the watching thread.
class OrphanGrace {
 public:
  // Reports at regular intervals whether the parent is dead. Does not return once it has been dead for too long.
  void note(bool is_orphan) {
    const auto now = std::chrono::steady_clock::now();
    if (is_orphan && !orphaned_at_) orphaned_at_ = now;
    if (orphaned_at_ && now - *orphaned_at_ > kGrace) ::_exit(EXIT_FAILURE);
  }

 private:
  static constexpr std::chrono::milliseconds kGrace{500};

  std::optional<std::chrono::steady_clock::time_point> orphaned_at_;
};

}  // namespace penstock::server
