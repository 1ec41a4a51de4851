// SPDX-License-Identifier: Apache-2.0
#include "server/watched_process.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

namespace penstock::server {
namespace {

TEST(WatchedProcess, TheParentIsThere) {
  EXPECT_FALSE(WatchedProcess(0).is_gone());
  EXPECT_FALSE(WatchedProcess(::getppid()).is_gone());
}

// As for a worker of a fork server, whose trainer is not its parent.
TEST(WatchedProcess, AnyOtherIsGoneOnceItHasEndedAlsoBeforeItIsWaitedFor) {
  const pid_t pid = ::fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    for (;;) ::pause();
  }
  const WatchedProcess watched(pid);
  EXPECT_FALSE(watched.is_gone());
  ASSERT_EQ(::kill(pid, SIGKILL), 0);
  siginfo_t info = {};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT), 0);
  EXPECT_TRUE(watched.is_gone());
  EXPECT_TRUE(WatchedProcess(pid).is_gone());
  ASSERT_EQ(::waitpid(pid, nullptr, 0), pid);
  EXPECT_TRUE(watched.is_gone());
  EXPECT_TRUE(WatchedProcess(pid).is_gone());
}

}  // namespace
}  // namespace penstock::server
