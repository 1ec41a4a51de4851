// SPDX-License-Identifier: Apache-2.0
#include "base/process_bound.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <optional>

namespace penstock {
namespace {

// Counts in memory that a fork copies, so that each process sees its own destructions only.
struct Counted {
  explicit Counted(int* destroyed_count) : destroyed_count(destroyed_count) {}
  ~Counted() { ++*destroyed_count; }
  int* destroyed_count;
  int value = 3;
};

// The exit status of a child that runs `body`. Leaves by _exit: nothing of the parent's is torn down.
template <typename Body>
int status_of_child(Body body) {
  const pid_t pid = ::fork();
  if (pid == 0) ::_exit(body());
  int status = -1;
  ::waitpid(pid, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(ProcessBound, DestroysItsObjectInTheProcessThatMadeIt) {
  int destroyed_count = 0;
  {
    const ProcessBound<Counted> bound(std::make_unique<Counted>(&destroyed_count));
    EXPECT_TRUE(bound.is_owner());
    EXPECT_EQ(bound->value, 3);
    EXPECT_EQ((*bound).value, 3);
  }
  EXPECT_EQ(destroyed_count, 1);
}

TEST(ProcessBound, LeavesItsObjectAloneInAForkedChild) {
  int destroyed_count = 0;
  std::optional<ProcessBound<Counted>> bound(std::in_place, std::make_unique<Counted>(&destroyed_count));
  const int child_status = status_of_child([&] {
    const bool was_owner = bound->is_owner();
    bound.reset();
    return was_owner ? 100 : destroyed_count;
  });
  EXPECT_EQ(child_status, 0) << "100: took itself for the owner; 1: destroyed its copy";
  bound.reset();
  EXPECT_EQ(destroyed_count, 1);
}

}  // namespace
}  // namespace penstock
