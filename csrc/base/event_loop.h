// SPDX-License-Identifier: Apache-2.0
#pragma once
// A named thread that serves its events, sleeps until more arrive, and serves again. Every I/O thread of penstock is
// one. Its owner says which events it serves, which descriptors it waits for, and how an error is handled.
//
// No exception is lost: if the handler throws, failed() gets the text with the name of the thread, and its owner raises
// it in the next call from outside.

#include <cstddef>
#include <functional>
#include <future>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>

#include "base/board.h"
#include "base/bounded_queue.h"
#include "base/result.h"
#include "base/waker.h"

namespace penstock {

// Thread-safe, but for start() and stop(), which are for the owner's thread. Bound to its process: a forked child must
// not destroy it (process_bound.h).
class EventLoop {
 public:
  // The work of a loop. All of it is called on the loop's thread.
  class Handler {
   public:
    Handler() = default;
    Handler(const Handler&) = delete;
    Handler& operator=(const Handler&) = delete;
    virtual ~Handler() = default;

    // Before the first turn. Must not block for long, as start() waits for it; its error is that of start().
    virtual Result<void> begin() { return {}; }
    // One turn: serves the events that are there, and a bounded number of them for each peer. An error ends the loop.
    virtual Result<void> serve() = 0;
    // Sleeps until there is more to serve, or until `wake_fd` is readable, and returns whether `wake_fd` is. Where
    // `may_sleep` is false it looks at its descriptors and returns at once. An error ends the loop.
    virtual Result<bool> wait(int wake_fd, bool may_sleep) = 0;
    // The last that is called, also where begin() or a turn failed. Sockets die here.
    virtual void end() {}
    // The loop ends with an error before it was told to, which health() has from now on. The error's text names the
    // thread if something was thrown.
    virtual void failed(Fault) {}
  };

  // `name` has at most 15 letters, as the system allows; `purpose` follows it in messages: "which receives batches".
  // The handler outlives the loop.
  EventLoop(std::string name, std::string purpose, Handler& handler);
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;
  ~EventLoop() { stop(); }

  // Starts the thread and waits for begin(). kNoMemory where the system has no thread or no descriptor left.
  Result<void> start();
  // Ends the loop after its turn and joins the thread. Actions that were posted and not carried out are dropped.
  // Blocks.
  void stop();

  // Has the thread carry something out before its next turn, in the order of posting. False, dropping it, once the loop
  // was stopped or has failed.
  bool post(std::function<void()> action);
  // Has the thread take a turn.
  void wake() { waker_.wake(); }
  // The same, for objects that only need to wake the loop.
  Waker& waker() { return waker_; }
  // The error with which the loop has ended, if it has before it was told to.
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
