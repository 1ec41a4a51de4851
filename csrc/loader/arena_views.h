// SPDX-License-Identifier: Apache-2.0
#pragma once
// The arenas that a trainer has mapped, to be retired before it forks.

#include <algorithm>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "shm/arena.h"

namespace penstock::loader {

// Thread-safe.
class ArenaViews {
 public:
  void add(const std::shared_ptr<shm::ArenaView>& view) {
    MutexLock lock(mutex_);
    std::erase_if(views_, [](const auto& old) { return old.expired(); });
    views_.emplace_back(view);
  }

  // Called before this process forks: calls shm::ArenaView::retire_held on every mapped arena.
  void retire_held() {
    MutexLock lock(mutex_);
    for (const auto& weak : views_) {
      if (const auto view = weak.lock()) view->retire_held();
    }
  }

 private:
  Mutex mutex_;
  std::vector<std::weak_ptr<shm::ArenaView>> views_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace penstock::loader
