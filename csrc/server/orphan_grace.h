// SPDX-License-Identifier: Apache-2.0
#pragma once
// The time in which a worker's main thread must notice the parent's death and exit by itself. The dataset may keep it
// from noticing; the watching thread then ends the process.

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <optional>

namespace penstock::server {

// Confined to the watching thread.
class OrphanGrace {
 public:
  // Reports at regular intervals whether the parent is dead. Does not return once it has been dead for too long.
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
