// SPDX-License-Identifier: Apache-2.0
#pragma once
// The process that a worker ends with: its trainer, or the process that started it for a pool.

#include <sys/types.h>

#include "base/file_descriptor.h"

namespace penstock::server {

// Thread-safe.
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

}  // namespace penstock::server
