// SPDX-License-Identifier: Apache-2.0
#include "base/child_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <ctime>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "child_process.h"

namespace penstock {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;

std::atomic<int> alarm_count{0};

// Of the timers that a program may have: its alarms, and a profiler that samples wall-clock time.
constexpr int kTimerSignals[] = {SIGALRM, SIGPROF};

// One of these signals each millisecond, on a thread that lets it through.
class Alarms {
 public:
  explicit Alarms(int number) : number_(number) {
    struct sigaction action {};
    action.sa_handler = [](int) { alarm_count.fetch_add(1); };  // and no SA_RESTART
    ::sigaction(number_, &action, &before_);
    alarm_count = 0;
    sigevent event{};
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = number_;
    EXPECT_EQ(::timer_create(CLOCK_MONOTONIC, &event, &timer_), 0);
    const timespec each{.tv_sec = 0, .tv_nsec = 1'000'000};
    const itimerspec times{.it_interval = each, .it_value = each};
    EXPECT_EQ(::timer_settime(timer_, 0, &times, nullptr), 0);
  }
  Alarms(const Alarms&) = delete;
  Alarms& operator=(const Alarms&) = delete;
  ~Alarms() {
    ::timer_delete(timer_);
    ::signal(number_, SIG_IGN);  // which drops one that waits
    ::sigaction(number_, &before_, nullptr);
  }

 private:
  const int number_;
  timer_t timer_{};
  struct sigaction before_ {};
};

class Pipe {
 public:
  Pipe() {
    if (::pipe2(ends_.data(), O_CLOEXEC) != 0) std::terminate();
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    ::close(ends_[0]);
    if (ends_[1] >= 0) ::close(ends_[1]);
  }
  int read_end() const { return ends_[0]; }
  void write(const std::string& text) const {
    ASSERT_EQ(::write(ends_[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
  }
  void close() { ::close(std::exchange(ends_[1], -1)); }

 private:
  std::array<int, 2> ends_{};
};

ChildProcess started(const std::vector<std::string>& command) {
  return ChildProcess::start({.command = command}).value();
}

std::string end_of(ChildProcess& child) {
  if (!child.wait_until(steady_clock::now() + seconds(30))) return "still runs";
  return child.poll()->spoken();
}

TEST(ChildProcess, TellsHowItEnded) {
  auto child = started({"sh", "-c", "exit 7"});
  EXPECT_EQ(end_of(child), "ended with exit code 7");
  EXPECT_EQ(child.poll()->spoken(), "ended with exit code 7");
  child = started({"sleep", "600"});
  EXPECT_FALSE(child.poll());
  EXPECT_FALSE(child.wait_until(steady_clock::now() + milliseconds(20)));
  child.signal(SIGTERM);
  EXPECT_EQ(end_of(child), "was ended by SIGTERM");
}

// A worker that had died counted as alive for ever where the program ignores SIGCHLD, as servers do.
TEST(ChildProcess, EndsAlsoWhereTheProgramIgnoresSigchld) {
  EXPECT_EQ(test::in_child([]() -> std::string {
              ::signal(SIGCHLD, SIG_IGN);
              auto child = started({"sleep", "600"});
              if (child.poll()) return "it did not start";
              child.signal(SIGTERM);
              return end_of(child);
            }),
            "ended (exit status unknown: this program ignores SIGCHLD, or waits for its children itself)");
}

// Its number was another process's by then, which was sent the signals.
TEST(ChildProcess, ThatTheProgramHasWaitedForItselfIsSentNoSignal) {
  EXPECT_EQ(test::in_child([]() -> std::string {
              auto child = started({"true"});
              int status = 0;
              if (::waitpid(-1, &status, 0) != child.pid()) return "it was not waited for";
              child.signal(SIGKILL);
              if (!child.poll() || child.poll()->status) return "its end is known";
              return "";
            }),
            "");
}

TEST(ChildProcess, WaitsUntilItsDeadlineHoweverManySignalsCome) {
  auto child = started({"sleep", "600"});
  for (const int number : kTimerSignals) {
    SCOPED_TRACE(::sigabbrev_np(number));
    const Alarms alarms(number);
    const auto deadline = steady_clock::now() + milliseconds(50);
    EXPECT_FALSE(child.wait_until(deadline));
    EXPECT_GE(steady_clock::now(), deadline);
    EXPECT_GT(alarm_count.load(), 0);
  }
}

// The first signal while a worker started was the end of the program: the worker "did not come to listen".
TEST(ReadLine, GoesOnHoweverManySignalsCome) {
  for (const int number : kTimerSignals) {
    SCOPED_TRACE(::sigabbrev_np(number));
    const Pipe pipe;
    sigset_t alarm;
    ::sigemptyset(&alarm);
    ::sigaddset(&alarm, number);
    ::pthread_sigmask(SIG_BLOCK, &alarm, nullptr);
    const Alarms alarms(number);
    const std::jthread writer([&] {  // which has the mask, so that the signals come to the reader
      while (alarm_count.load() < 20) std::this_thread::yield();
      pipe.write("5 tcp://127.0.0.1:7000\nmore");
    });
    ::pthread_sigmask(SIG_UNBLOCK, &alarm, nullptr);
    const auto line = read_line_until(pipe.read_end(), steady_clock::now() + seconds(30));
    ASSERT_TRUE(line) << line.error().message;
    EXPECT_EQ(line.value(), "5 tcp://127.0.0.1:7000");
  }
}

// A child that hung as it started hung the program for ever.
TEST(ReadLine, EndsAtItsDeadline) {
  const Pipe pipe;
  pipe.write("half a line");
  EXPECT_EQ(read_line_until(pipe.read_end(), steady_clock::now() + milliseconds(20)).error().code, Errc::kTimeout);
}

TEST(ReadLine, EndsWithThePipe) {
  Pipe pipe;
  pipe.write("half a line");
  pipe.close();
  EXPECT_EQ(read_line_until(pipe.read_end(), steady_clock::now() + seconds(30)).error().code, Errc::kClosed);
}

}  // namespace
}  // namespace penstock
