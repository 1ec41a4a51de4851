// SPDX-License-Identifier: Apache-2.0
#include "base/event_loop.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <stdexcept>
#include <string>
#include <vector>

namespace penstock {
namespace {

// Sleeps until it is woken, and does the work that the test has set.
class Recorder : public EventLoop::Handler {
 public:
  Result<void> begin() override {
    std::array<char, 16> name{};
    ::pthread_getname_np(::pthread_self(), name.data(), name.size());
    thread_name = name.data();
    return on_begin ? on_begin() : Result<void>();
  }
  Result<void> serve() override {
    ++turn_count;
    return on_serve ? on_serve() : Result<void>();
  }
  Result<bool> wait(int wake_fd, bool may_sleep) override {
    pollfd item{.fd = wake_fd, .events = POLLIN, .revents = 0};
    ::poll(&item, 1, may_sleep ? -1 : 0);
    return item.revents != 0;
  }
  void end() override {
    has_ended.store(true);
    if (on_end) on_end();
  }
  void failed(Fault error) override { failure.set_value(std::move(error)); }

  std::function<Result<void>()> on_begin;
  std::function<Result<void>()> on_serve;
  std::function<void()> on_end;
  std::string thread_name;
  std::atomic<int> turn_count{0};
  std::atomic<bool> has_ended{false};
  std::promise<Fault> failure;
};

constexpr const char* kPurpose = "which is a test";

TEST(EventLoop, CarriesOutWhatIsPostedInItsOrderOnAThreadOfThatName) {
  Recorder recorder;
  EventLoop loop("pk_test", kPurpose, recorder);
  ASSERT_TRUE(loop.start());
  std::vector<int> seen;
  std::promise<void> done;
  for (int number = 0; number < 1000; ++number) loop.post([&seen, number] { seen.push_back(number); });
  loop.post([&done] { done.set_value(); });
  done.get_future().wait();
  ASSERT_EQ(seen.size(), 1000u);
  for (int number = 0; number < 1000; ++number) EXPECT_EQ(seen[static_cast<size_t>(number)], number);
  loop.stop();
  EXPECT_TRUE(loop.health()) << "it was told to end";
  EXPECT_EQ(recorder.thread_name, "pk_test");
  EXPECT_TRUE(recorder.has_ended);
}

TEST(EventLoop, ServesWhileActionsKeepComing) {
  Recorder recorder;
  EventLoop loop("pk_test", kPurpose, recorder);
  std::promise<void> done;
  bool is_done = false;
  // Each action posts the next: without a bound on a turn, serve() would never be reached.
  std::function<void()> again = [&] {
    if (recorder.turn_count > 1 && !std::exchange(is_done, true)) done.set_value();
    if (!is_done) loop.post(again);
  };
  ASSERT_TRUE(loop.start());
  loop.post(again);
  done.get_future().wait();
  loop.stop();
}

TEST(EventLoop, TakesATurnWhenItIsWoken) {
  Recorder recorder;
  std::promise<void> second;
  recorder.on_serve = [&]() -> Result<void> {
    if (recorder.turn_count == 2) second.set_value();
    return {};
  };
  EventLoop loop("pk_test", kPurpose, recorder);
  ASSERT_TRUE(loop.start());
  while (recorder.turn_count < 1) std::this_thread::yield();
  loop.wake();
  second.get_future().wait();
  loop.stop();
}

TEST(EventLoop, AWakeWhileItServesIsNotLost) {
  Recorder recorder;
  std::promise<void> second;
  EventLoop loop("pk_test", kPurpose, recorder);
  recorder.on_serve = [&]() -> Result<void> {
    if (recorder.turn_count == 1) loop.wake();  // of another thread that left something the turn has just looked for
    if (recorder.turn_count == 2) second.set_value();
    return {};
  };
  ASSERT_TRUE(loop.start());
  EXPECT_EQ(second.get_future().wait_for(std::chrono::seconds(30)), std::future_status::ready);
  loop.stop();
}

TEST(EventLoop, SleepsWhenThereIsNothingToDo) {
  Recorder recorder;
  EventLoop loop("pk_test", kPurpose, recorder);
  ASSERT_TRUE(loop.start());
  for (int count = 0; count < 20; ++count) {
    std::promise<void> done;
    loop.post([&done] { done.set_value(); });
    done.get_future().wait();
  }
  loop.stop();
  // A turn for each wake, and one after each for a descriptor that was written to late.
  EXPECT_LE(recorder.turn_count, 45);
}

TEST(EventLoop, AnErrorOfItsBeginningIsThatOfStart) {
  Recorder recorder;
  recorder.on_begin = []() -> Result<void> { return Fault{Errc::kFailed, "the port is taken"}; };
  EventLoop loop("pk_test", kPurpose, recorder);
  const auto started = loop.start();
  ASSERT_FALSE(started);
  EXPECT_EQ(started.error().message, "the port is taken");
  EXPECT_EQ(recorder.turn_count, 0);
  EXPECT_TRUE(recorder.has_ended) << "what it had opened is closed";
}

TEST(EventLoop, WhatItsBeginningThrowsIsTheErrorOfStart) {
  Recorder recorder;
  recorder.on_begin = []() -> Result<void> { throw std::runtime_error("no memory for it"); };
  EventLoop loop("pk_test", kPurpose, recorder);
  const auto started = loop.start();
  ASSERT_FALSE(started);
  EXPECT_EQ(started.error().message, "the thread pk_test, which is a test, failed: no memory for it");
}

TEST(EventLoop, WhatATurnThrowsIsReportedWithTheNameOfTheThread) {
  Recorder recorder;
  recorder.on_serve = []() -> Result<void> { throw std::runtime_error("a broken pipe"); };
  EventLoop loop("pk_test", kPurpose, recorder);
  EXPECT_TRUE(loop.health());
  ASSERT_TRUE(loop.start());
  const Fault error = recorder.failure.get_future().get();
  EXPECT_EQ(error.message, "the thread pk_test, which is a test, failed: a broken pipe");
  ASSERT_FALSE(loop.health());
  EXPECT_EQ(loop.health().error(), error);
  loop.stop();
  EXPECT_TRUE(recorder.has_ended);
  EXPECT_FALSE(loop.post([] {}));
}

TEST(EventLoop, WhatAnActionThrowsIsReported) {
  Recorder recorder;
  EventLoop loop("pk_test", kPurpose, recorder);
  ASSERT_TRUE(loop.start());
  loop.post([] { throw 7; });
  const Fault error = recorder.failure.get_future().get();
  EXPECT_EQ(error.message, "the thread pk_test, which is a test, failed: an exception that is not a std::exception");
  loop.stop();
}

TEST(EventLoop, AnErrorOfATurnEndsIt) {
  Recorder recorder;
  recorder.on_serve = []() -> Result<void> { return Fault{Errc::kClosed, "it was told to"}; };
  EventLoop loop("pk_test", kPurpose, recorder);
  ASSERT_TRUE(loop.start());
  EXPECT_EQ(recorder.failure.get_future().get().message, "it was told to");
  loop.stop();
  EXPECT_TRUE(recorder.has_ended);
  EXPECT_EQ(recorder.turn_count, 1);
}

TEST(EventLoop, WhatItsEndThrowsIsReported) {
  Recorder recorder;
  recorder.on_end = [] { throw std::runtime_error("a socket that does not close"); };
  EventLoop loop("pk_test", kPurpose, recorder);
  ASSERT_TRUE(loop.start());
  loop.stop();
  EXPECT_EQ(recorder.failure.get_future().get().message,
            "the thread pk_test, which is a test, failed: a socket that does not close");
}

TEST(EventLoop, OneThatNeverStartedIsStopped) {
  Recorder recorder;
  EventLoop loop("pk_test", kPurpose, recorder);
  loop.stop();
  EXPECT_FALSE(recorder.has_ended);
}

}  // namespace
}  // namespace penstock
