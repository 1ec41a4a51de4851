// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ends a local worker whose trainer is dead, if the thread that serves requests does not come back to see it: that one
// may be in the dataset for long.

#include <sys/types.h>

#include <atomic>

#include "base/event_loop.h"
#include "base/result.h"
#include "server/orphan_grace.h"
#include "server/watched_process.h"

namespace penstock::worker {

// Thread-safe.
class Watchdog final : private EventLoop::Handler {
 public:
  // Looks at the connection to the trainer, and at whether the trainer's process is there. Once it is not, or this
  // fails, the connection is shut down, so that whoever waits for the trainer goes on: another process may hold the
  // trainer's end. `trainer_pid` is as for server::WatchedProcess.
  Watchdog(int connection_fd, pid_t trainer_pid);
  ~Watchdog() override { loop_.stop(); }

  Result<void> start() { return loop_.start(); }

  // True once the trainer hung up or died. For who waits for memory meanwhile, too.
  const std::atomic<bool>& is_closing() const { return is_closing_; }
  std::atomic<bool>& is_closing() { return is_closing_; }
  // kClosed once the trainer is gone, or the error that this failed with.
  Result<void> health() const;

 private:
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void failed(Fault) override { hang_up(); }
  void hang_up();

  const int connection_fd_;
  const server::WatchedProcess trainer_;
  std::atomic<bool> is_closing_{false};
  bool has_hung_up_ = false;
  server::OrphanGrace grace_;
  EventLoop loop_;
};

}  // namespace penstock::worker
