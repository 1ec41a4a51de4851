// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ends a local worker whose trainer is dead, in case the thread that serves requests does not return to notice it: that
// thread may stay in the dataset for a long time.

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
  // Watches the connection to the trainer and the trainer's process. When the process is gone or this object fails, it
  // shuts down the connection, so that threads waiting for the trainer continue: another process may hold the trainer's
  // end. `trainer_pid` is as for server::WatchedProcess.
  Watchdog(int connection_fd, pid_t trainer_pid);
  ~Watchdog() override { loop_.stop(); }

  Result<void> start() { return loop_.start(); }

  // True once the trainer hung up or died. Also for threads that wait for memory meanwhile.
  const std::atomic<bool>& is_closing() const { return is_closing_; }
  std::atomic<bool>& is_closing() { return is_closing_; }
  // kClosed once the trainer is gone, or the error with which this object failed.
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
