// SPDX-License-Identifier: Apache-2.0
#include "server/watched_process.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>

#include "base/child_process.h"

namespace penstock::server {

WatchedProcess::WatchedProcess(pid_t pid) : pid_(pid != 0 ? pid : ::getppid()), is_parent_(pid_ == ::getppid()) {
  if (!is_parent_) handle_ = open_process_handle(pid_);
}

bool WatchedProcess::is_gone() const {
  if (is_parent_) return ::getppid() != pid_;
  // Without a handle, either the process is gone, or the system does not provide one; then an unreaped process counts
  // as alive.
  if (!handle_) return ::kill(pid_, 0) != 0 && errno == ESRCH;
  pollfd item{.fd = handle_.get(), .events = POLLIN, .revents = 0};
  return ::poll(&item, 1, 0) == 1;
}

}  // namespace penstock::server
