// SPDX-License-Identifier: Apache-2.0
#pragma once
// A named thread that serves its events, sleeps until more arrive, and serves again. Every I/O thread of penstock is
// one. Its owner defines the events that it serves, the descriptors that it waits for, and the handling of errors.
//
// No exception is lost: if the handler throws, failed() receives the text with the name of the thread, and the owner
// raises it from the next call by another thread.

#include <cstddef>
#include <functional>
#include <future>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>

#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/result.h"

namespace penstock {

// Thread-safe, except start() and stop(), which are confined to the owner's thread. Bound to its process: a forked
// child must not destroy it (process.h).
class EventLoop {
 public:
  // The work of a loop. All methods are called on the loop's thread.
  class Handler {
   public:
    Handler() = default;
    Handler(const Handler&) = delete;
    Handler& operator=(const Handler&) = delete;
    virtual ~Handler() = default;

    // Called before the first turn. Must not block for long, as start() waits for it; start() returns its error.
    virtual Result<void> begin() { return {}; }
    // One turn: serves the pending events, a bounded number for each peer. An error ends the loop.
    virtual Result<void> serve() = 0;
    // Sleeps until there is more to serve, or until `wake_fd` is readable, and returns whether `wake_fd` is readable.
    // If `may_sleep` is false, it polls its descriptors and returns immediately. An error ends the loop.
    virtual Result<bool> wait(int wake_fd, bool may_sleep) = 0;
    // The last call, also if begin() or a turn failed. Sockets are closed here.
    virtual void end() {}
    // The loop ends with an error before it was stopped; health() returns the error from now on. If an exception was
    // thrown, the error's text names the thread.
    virtual void failed(Fault) {}
  };

  // `name` has at most 15 characters, the system's limit; `purpose` follows it in messages: "which receives batches".
  // The handler must outlive the loop.
  EventLoop(std::string name, std::string purpose, Handler& handler);
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;
  ~EventLoop() { stop(); }

  // Starts the thread and waits for begin(). kNoMemory if the system has no thread or no descriptor left.
  Result<void> start();
  // Ends the loop after its turn and joins the thread. Drops posted actions that were not executed. Blocks.
  void stop();

  // Executes an action on the thread before its next turn, in the order of posting. Returns false and drops the action
  // once the loop was stopped or has failed.
  bool post(std::function<void()> action);
  // Makes the thread take a turn.
  void wake() { waker_.wake(); }
  // The same, for objects that only need to wake the loop.
  Waker& waker() { return waker_; }
  // The error that ended the loop, if one did before it was stopped.
  Result<void> health() const;

 private:
  void run(const std::stop_token& stop, std::promise<Result<void>>& begun);
  Result<void> turn(const std::stop_token& stop);
  void fail(Fault error);
  Fault thrown(const std::string& what) const;

  const std::string name_;
  const std::string purpose_;
  Handler& handler_;
  Waker waker_;
  BoundedQueue<std::function<void()>> actions_;
  Board<std::optional<Fault>> failure_;
  std::jthread thread_;
};

}  // namespace penstock
