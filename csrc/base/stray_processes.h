// SPDX-License-Identifier: Apache-2.0
#pragma once
// Ends the processes that a program leaves running: processes that it has started in separate sessions, and their
// descendants. No process group or session contains all of them, but a parent does. A child subreaper becomes the
// parent of every descendant whose parent ends, and so finds them among its children.

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <set>
#include <span>
#include <vector>

namespace penstock {

// From now on, descendants of this process whose parent has ended become its children, unless a process in between
// adopts them. A forked child does not inherit this setting, but may set it for itself.
void adopt_orphans();

// The threads of this process; none if the system does not list them.
std::vector<pid_t> own_threads();

// The children of this process, of all its threads, including ended children that were not waited for.
std::vector<pid_t> child_processes();

// Ends children that this process has not started. Confined to one thread at a time.
class StrayProcesses {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  // Adopts orphans from now on. Children that the process already has do not count as strays: a shell may have left
  // them to the program that replaced it by exec().
  StrayProcesses();

  // Kills and waits for all children except `own`, and then for the processes that these leave behind. Returns false if
  // some have not ended at the deadline. A process that this one may not signal is left alone. Blocks.
  [[nodiscard]] bool end_all_but(std::span<const pid_t> own, Deadline deadline);

 private:
  std::set<pid_t> kept_;
};

// This many ended children are left to the code that started them, which may still wait for them.
constexpr size_t kEndedChildrenMax = 256;

// Waits for ended children of this process, oldest first, if there are more than `kept` of them. Adopted children stay
// until they are waited for, and use a process number each; they cannot be distinguished from other children.
void forget_ended_children(size_t kept = kEndedChildrenMax);

}  // namespace penstock
