// SPDX-License-Identifier: Apache-2.0
#include "base/event_loop.h"

#include <pthread.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <system_error>
#include <utility>

#include "base/process.h"
#include "base/result.h"

namespace penstock {
namespace {

constexpr size_t kActionCountMax = 1 << 20;  // bounded by the outstanding requests, far below this
// Keeps a flood of actions from delaying the peers' messages.
constexpr size_t kActionsPerTurn = 256;

}  // namespace

EventLoop::EventLoop(std::string name, std::string purpose, Handler& handler)
    : name_(std::move(name)), purpose_(std::move(purpose)), handler_(handler), actions_(kActionCountMax) {}

Result<void> EventLoop::start() {
  PENSTOCK_ASSERT(!thread_.joinable(), "the thread ", name_, " is already running");
  if (!waker_)
    return Fault{Errc::kNoMemory, "starting the thread " + name_ + ", " + purpose_ +
                                      ", failed: no descriptor is left (eventfd); raise the limit of open files "
                                      "(ulimit -n)"};
  std::promise<Result<void>> begun;
  auto outcome = begun.get_future();
  try {
    // The thread owns its end of the promise, since it may still be inside set_value() when the value is visible here.
    thread_ = std::jthread([this, begun = std::move(begun)](const std::stop_token& stop) mutable { run(stop, begun); });
  } catch (const std::system_error& error) {
    return Fault{Errc::kNoMemory, "starting the thread " + name_ + ", " + purpose_ + ", failed: " + error.what() +
                                      "; raise the limit of processes and threads (ulimit -u, pids of a container)"};
  }
  auto result = outcome.get();
  if (!result) thread_.join();
  return result;
}

void EventLoop::stop() {
  if (!thread_.joinable()) return;
  thread_.request_stop();
  actions_.close();
  waker_.wake();
  thread_.join();
}

bool EventLoop::post(std::function<void()> action) {
  if (!actions_.push(std::move(action))) return false;
  waker_.wake();
  return true;
}

Result<void> EventLoop::health() const {
  const auto failure = failure_.get();
  return failure ? Result<void>(*failure) : Result<void>();
}

void EventLoop::run(const std::stop_token& stop, std::promise<Result<void>>& begun) {
  ::pthread_setname_np(::pthread_self(), name_.c_str());
  const auto guarded = [this](auto call) -> Result<void> {
    try {
      return call();
    } catch (...) {
      return thrown(current_exception_text());
    }
  };
  auto result = guarded([&] { return handler_.begin(); });
  const bool has_begun = static_cast<bool>(result);
  begun.set_value(std::move(result));
  while (has_begun && !stop.stop_requested()) {
    if (auto turned = guarded([&] { return turn(stop); }); !turned) {
      actions_.close();
      fail(turned.error());
      break;
    }
  }
  const auto ended = guarded([&]() -> Result<void> {
    handler_.end();
    return {};
  });
  if (!ended) fail(ended.error());
}

Result<void> EventLoop::turn(const std::stop_token& stop) {
  waker_.begin_turn();
  for (size_t count = 0; count < kActionsPerTurn; ++count) {
    auto action = actions_.try_pop();
    if (!action) break;
    (*action)();
  }
  if (auto served = handler_.serve(); !served) return served;
  const bool may_sleep = waker_.begin_sleep() && actions_.size() == 0 && !stop.stop_requested();
  const auto waited = handler_.wait(waker_.fd(), may_sleep);
  waker_.end_sleep(waited && waited.value());
  if (!waited) return waited.error();
  return {};
}

void EventLoop::fail(Fault error) {
  failure_.set(error);
  handler_.failed(std::move(error));
}

Fault EventLoop::thrown(const std::string& what) const {
  return {Errc::kFailed, "the thread " + name_ + ", " + purpose_ + ", failed: " + what};
}

}  // namespace penstock
