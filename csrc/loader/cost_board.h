// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a pool's workers have spent on a trainer, as its I/O thread counts it, for the thread that is asked for it.

#include "base/mutex.h"
#include "wire/reports.h"

namespace penstock::loader {

// Thread-safe.
class CostBoard {
 public:
  void set(const wire::JobCosts& costs) {
    const MutexLock lock(mutex_);
    costs_ = costs;
  }
  wire::JobCosts get() const {
    const MutexLock lock(mutex_);
    return costs_;
  }

 private:
  mutable Mutex mutex_;
  wire::JobCosts costs_ PENSTOCK_GUARDED_BY(mutex_);
};

}  // namespace penstock::loader
