// SPDX-License-Identifier: Apache-2.0
#include "base/child_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <ctime>
#include <functional>
#include <future>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
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
  return child.poll()->describe();
}

TEST(ChildProcess, TellsHowItEnded) {
  auto child = started({"sh", "-c", "exit 7"});
  EXPECT_EQ(end_of(child), "ended with exit code 7");
  EXPECT_EQ(child.poll()->describe(), "ended with exit code 7");
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

class ExitPipeTest : public testing::Test {
 protected:
  void write(std::string_view bytes) const {
    ASSERT_EQ(::write(pipe_.write_fd(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }

  ExitPipe pipe_ = ExitPipe::open().value();
};

TEST_F(ExitPipeTest, NothingIsToldBeforeTheProcessTellsIt) {
  EXPECT_TRUE(pipe_.read());
  EXPECT_FALSE(pipe_.has_served());
  EXPECT_EQ(pipe_.end(), std::nullopt);
}

TEST_F(ExitPipeTest, EachWordCrossesWithItsText) {
  for (const ExitWord word : {ExitWord::kDrained, ExitWord::kUseless, ExitWord::kFailed}) {
    write_exit_line(pipe_.write_fd(), word, "why of " + std::string(name_of(word)));
    EXPECT_TRUE(pipe_.read());
    EXPECT_EQ(pipe_.end(), word);
    EXPECT_EQ(pipe_.text(), "why of " + std::string(name_of(word)));
    EXPECT_EQ(exit_word_named(name_of(word)), word);
  }
}

TEST_F(ExitPipeTest, ServingIsNoEndAndTheLastWordCounts) {
  write_exit_line(pipe_.write_fd(), ExitWord::kFailed, "a line\nof two");
  write_exit_line(pipe_.write_fd(), ExitWord::kDrained);
  write_exit_line(pipe_.write_fd(), ExitWord::kServing);
  EXPECT_TRUE(pipe_.read());
  EXPECT_TRUE(pipe_.has_served());
  EXPECT_EQ(pipe_.end(), ExitWord::kDrained);
  EXPECT_EQ(pipe_.text(), "");
}

TEST_F(ExitPipeTest, WorkersThatHaveLeftAreNoEndOfTheProcess) {
  EXPECT_TRUE(pipe_.left().empty());
  write_exit_line(pipe_.write_fd(), ExitWord::kLeft, "2");
  write_exit_line(pipe_.write_fd(), ExitWord::kLeft, "0");
  write("left\nleft x\nleft -1\nleft 1 \nleft 99999999\nleft 99999999999999999999\n");
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.left(), (std::set<size_t>{0, 2}));
  EXPECT_EQ(pipe_.end(), std::nullopt);
  EXPECT_FALSE(pipe_.has_served());
}

TEST_F(ExitPipeTest, WhatADatasetWritesThereIsIgnored) {
  write("\n \nDRAINED\ndrainedly\nuseless-ish x\n");
  write(std::string(3 * kExitLineBytesMax, 'x'));
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.end(), std::nullopt);
  write("y\n");
  write_exit_line(pipe_.write_fd(), ExitWord::kFailed, "why");
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.end(), ExitWord::kFailed);
  EXPECT_EQ(pipe_.text(), "why");
}

TEST_F(ExitPipeTest, LongTextIsCutOff) {
  write_exit_line(pipe_.write_fd(), ExitWord::kFailed, std::string(100 * kExitLineBytesMax, 'x'));
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.text(), std::string(kExitLineBytesMax - 1 - std::string_view("failed ").size(), 'x'));
}

TEST_F(ExitPipeTest, FullPipeStopsNobody) {
  const std::string lines(kExitLineBytesMax, '\n');
  while (::write(pipe_.write_fd(), lines.data(), lines.size()) > 0) {
  }
  write_exit_line(pipe_.write_fd(), ExitWord::kDrained);
  EXPECT_TRUE(pipe_.read());
  write_exit_line(pipe_.write_fd(), ExitWord::kDrained);
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.end(), ExitWord::kDrained);
}

// A child that a dataset had forked lived on after its worker: the supervisor must not wait for it.
TEST_F(ExitPipeTest, ProcessThatKeepsThePipeOpenHoldsUpNobody) {
  FileDescriptor of_forked_child(::dup(pipe_.write_fd()));
  write_exit_line(pipe_.write_fd(), ExitWord::kFailed, "why");
  pipe_.close_write();
  EXPECT_TRUE(pipe_.read());
  EXPECT_EQ(pipe_.text(), "why");
  of_forked_child.reset();
  EXPECT_FALSE(pipe_.read());
  EXPECT_EQ(pipe_.end(), ExitWord::kFailed);
}

TEST(ExitLine, IsWrittenNowhereWithoutAPipe) { write_exit_line(-1, ExitWord::kFailed, "why"); }

using std::chrono::minutes;
using test::in_child;

steady_clock::time_point far_away() { return steady_clock::now() + minutes(1); }

// A pipe whose reading end is at its end once all processes have ended that had the writing one.
class Lives {
 public:
  Lives() {
    if (::pipe2(ends_.data(), O_CLOEXEC) != 0) ::_exit(1);
  }
  Lives(const Lives&) = delete;
  Lives& operator=(const Lives&) = delete;
  ~Lives() {
    ::close(ends_[0]);
    ::close(ends_[1]);
  }
  // From a process that has it, once.
  void say(pid_t pid) const { static_cast<void>(::write(ends_[1], &pid, sizeof pid) < 0); }
  // What one of them has said; 0 once all have ended. This process is none of them from now on.
  pid_t next() {
    ::close(ends_[1]);
    ends_[1] = -1;
    pid_t pid = 0;
    while (::read(ends_[0], &pid, sizeof pid) < 0 && errno == EINTR) {
    }
    return pid;
  }

 private:
  std::array<int, 2> ends_{};
};

pid_t forked(const std::function<void()>& body) {
  const pid_t pid = ::fork();
  if (pid != 0) return pid;
  body();
  ::_exit(0);
}

void wait_for(pid_t pid) {
  while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

[[noreturn]] void sleep_deaf() {
  ::signal(SIGTERM, SIG_IGN);
  ::signal(SIGHUP, SIG_IGN);
  for (;;) ::pause();
}

// What a daemon does: it is no child of whoever starts it, and in a session of its own.
void start_daemon(const Lives& lives) {
  const pid_t middle = forked([&] {
    ::setsid();
    forked([&] {
      lives.say(::getpid());
      sleep_deaf();
    });
  });
  wait_for(middle);
}

bool contains(const std::vector<pid_t>& pids, pid_t pid) { return std::ranges::find(pids, pid) != pids.end(); }

TEST(OwnThreads, AreThoseThatRun) {
  EXPECT_EQ(in_child([]() -> std::string {  // whose threads are its own
              const size_t before = own_threads().size();
              std::promise<void> end;
              std::thread other([&] { end.get_future().wait(); });
              const std::vector<pid_t> both = own_threads();
              end.set_value();
              other.join();
              if (!contains(both, ::getpid())) return "the first thread is missing";
              return both.size() == before + 1 ? "" : std::to_string(both.size()) + " threads";
            }),
            "");
}

TEST(StrayProcesses, AProcessInASessionOfItsOwnEndsAfterItsParentHas) {
  EXPECT_EQ(in_child([] {
              StrayProcesses strays;
              Lives lives;
              wait_for(forked([&] { start_daemon(lives); }));
              const pid_t stray = lives.next();
              if (!contains(child_processes(), stray)) return std::string("it was not adopted");
              if (!strays.end_all_but({}, far_away())) return std::string("it was not ended in time");
              if (!child_processes().empty()) return std::string("there are children left");
              return std::string(lives.next() == 0 ? "" : "it lives");
            }),
            "");
}

TEST(StrayProcesses, WhatAStrayHasStartedEndsWithIt) {
  EXPECT_EQ(in_child([] {
              StrayProcesses strays;
              Lives lives;
              wait_for(forked([&] {
                forked([&] {
                  ::setsid();
                  ::prctl(PR_SET_CHILD_SUBREAPER, 1);  // it keeps its own beneath it
                  forked([&] { start_daemon(lives), start_daemon(lives), sleep_deaf(); });
                  sleep_deaf();
                });
              }));
              lives.next();
              lives.next();
              if (!strays.end_all_but({}, far_away())) return std::string("they were not ended in time");
              return std::string(lives.next() == 0 ? "" : "one lives");
            }),
            "");
}

TEST(StrayProcesses, OnesThatForkAndEndAllTheTimeAreCaught) {
  EXPECT_EQ(in_child([] {
              StrayProcesses strays;
              Lives lives;
              wait_for(forked([&] {
                for (int count = 0; count < 3; ++count)
                  forked([&] {
                    ::setsid();
                    lives.say(::getpid());
                    // Each is a child of the one before, which has ended.
                    while (::fork() == 0) {
                    }
                  });
              }));
              for (int count = 0; count < 3; ++count) lives.next();
              if (!strays.end_all_but({}, far_away())) return std::string("they were not caught in time");
              return std::string(lives.next() == 0 ? "" : "one lives");
            }),
            "");
}

TEST(StrayProcesses, ChildrenOfOnesOwnAndWhatTheyHaveAdoptedLiveOn) {
  EXPECT_EQ(in_child([] {
              const pid_t before = forked([] { sleep_deaf(); });
              StrayProcesses strays;
              Lives lives;
              const pid_t own = forked([&] {
                adopt_orphans();
                start_daemon(lives);
                sleep_deaf();
              });
              const pid_t of_own = lives.next();
              if (!strays.end_all_but({&own, 1}, far_away())) return std::string("something was not ended in time");
              const bool are_there = ::kill(before, 0) == 0 && ::kill(own, 0) == 0 && ::kill(of_own, 0) == 0;
              if (!are_there || child_processes().size() != 2) return std::string("one has ended");
              ::kill(own, SIGKILL);
              wait_for(own);
              if (!strays.end_all_but({}, far_away())) return std::string("something was not ended in time");
              if (lives.next() != 0) return std::string("the stray of a child that has ended lives");
              if (child_processes() != std::vector{before}) return std::string("the first child has ended");
              ::kill(before, SIGKILL);
              wait_for(before);
              return std::string();
            }),
            "");
}

TEST(StrayProcesses, AreChildrenOfEachThread) {
  EXPECT_EQ(in_child([] {
              pid_t child = 0;
              std::thread([&] { child = forked([] { sleep_deaf(); }); }).join();
              const bool is_there = contains(child_processes(), child);
              ::kill(child, SIGKILL);
              wait_for(child);
              return std::string(is_there && child_processes().empty() ? "" : "the child of a thread was not found");
            }),
            "");
}

TEST(StrayProcesses, OfThoseThatHaveEndedTheLastOnesAreLeftToBeWaitedFor) {
  EXPECT_EQ(in_child([] {
              std::vector<pid_t> children;
              for (int count = 0; count < 5; ++count) {
                children.push_back(forked([] {}));
                siginfo_t info{};
                ::waitid(P_PID, static_cast<id_t>(children.back()), &info, WEXITED | WNOWAIT);
              }
              const pid_t living = forked([] { sleep_deaf(); });
              forget_ended_children(2);
              std::vector<pid_t> left = child_processes();
              std::ranges::sort(left);
              std::vector<pid_t> expected{children[3], children[4], living};
              std::ranges::sort(expected);
              ::kill(living, SIGKILL);
              for (const pid_t pid : expected) wait_for(pid);
              return std::string(left == expected ? "" : "others were left");
            }),
            "");
}

}  // namespace
}  // namespace penstock
