// SPDX-License-Identifier: Apache-2.0
#pragma once
// The time that a worker's main thread has, once the parent is dead, to see that and leave by itself. The dataset may
// keep it from seeing anything, and then the thread that watches ends the process.

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <optional>

namespace penstock::server {

// Confined to the thread that watches.
class OrphanGrace {
 public:
  // Says whether the parent is dead, every now and then. Does not return once it has been for too long.
  void note(bool is_orphan) {
    const auto now = std::chrono::steady_clock::now();
    if (is_orphan && !orphaned_at_) orphaned_at_ = now;
    if (orphaned_at_ && now - *orphaned_at_ > kGrace) ::_exit(EXIT_FAILURE);
  }

 private:
  static constexpr std::chrono::milliseconds kGrace{500};

  std::optional<std::chrono::steady_clock::time_point> orphaned_at_;
};

}  // namespace penstock::server
