// SPDX-License-Identifier: Apache-2.0
#include "base/stray_processes.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "child_process.h"

namespace penstock {
namespace {

using std::chrono::minutes;
using std::chrono::steady_clock;
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
