// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a program leaves running when it ends: processes that it has started in sessions of their own, and what these
// have started. No group and no session has all of them, but a parent does. A process that adopts orphans (a child
// subreaper) becomes the parent of every descendant whose own parent ends, and so finds them among its children.

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <set>
#include <span>
#include <vector>

namespace penstock {

// From now on descendants of this process whose parent has ended are its children, unless a process between the two
// adopts them. This is no property of a child that it forks, which may have it for itself.
void adopt_orphans();

// The threads of this process; none where the system does not show them.
std::vector<pid_t> own_threads();

// The children of this process, by whichever of its threads, with those that have ended and were not waited for.
std::vector<pid_t> child_processes();

// Ends children that this process has not started. Confined to one thread at a time.
class StrayProcesses {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Adopts orphans from now on. Children that this process has by then are no strays: a shell may have left them to
  // the program that it became.
  StrayProcesses();

  // Kills and waits for all children but `own`, and what they leave behind in turn. False where some have not ended at
  // the deadline. A process that this one may not signal is left alone. Blocks.
  [[nodiscard]] bool end_all_but(std::span<const pid_t> own, Deadline deadline);

 private:
  std::set<pid_t> kept_;
};

// So many children that have ended are left to the code that has started them, and may still wait for them.
constexpr size_t kEndedChildrenMax = 256;

// Waits for children of this process that have ended, where there are more than `kept` of them, the oldest first. Those
// that it has adopted stay until somebody waits for them, and take a process number each; which these are cannot be
// told.
void forget_ended_children(size_t kept = kEndedChildrenMax);

}  // namespace penstock
