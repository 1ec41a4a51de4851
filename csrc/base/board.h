// SPDX-License-Identifier: Apache-2.0
#pragma once
// Publishes the latest value that one thread knows to other threads.

#include "base/mutex.h"

namespace penstock {

// Thread-safe.
template <typename Value>
class Board {
 public:
  void set(const Value& value) {
    const MutexLock lock(mutex_);
    value_ = value;
  }
  Value get() const {
    const MutexLock lock(mutex_);
    return value_;
  }

 private:
  mutable Mutex mutex_;
  Value value_ PENSTOCK_GUARDED_BY(mutex_){};
};

}  // namespace penstock
