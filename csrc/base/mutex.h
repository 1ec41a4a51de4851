// SPDX-License-Identifier: Apache-2.0
#pragma once
// A mutex and a condition variable for Clang's thread-safety analysis. Condition variables live only in base/.

#include <chrono>
#include <condition_variable>
#include <mutex>

#if defined(__clang__)
#define PENSTOCK_THREAD_ANNOTATION(x) __attribute__((x))
#else
#define PENSTOCK_THREAD_ANNOTATION(x)
#endif

#define PENSTOCK_CAPABILITY(x) PENSTOCK_THREAD_ANNOTATION(capability(x))
#define PENSTOCK_SCOPED_CAPABILITY PENSTOCK_THREAD_ANNOTATION(scoped_lockable)
#define PENSTOCK_GUARDED_BY(x) PENSTOCK_THREAD_ANNOTATION(guarded_by(x))
#define PENSTOCK_REQUIRES(...) PENSTOCK_THREAD_ANNOTATION(requires_capability(__VA_ARGS__))
#define PENSTOCK_ACQUIRE(...) PENSTOCK_THREAD_ANNOTATION(acquire_capability(__VA_ARGS__))
#define PENSTOCK_RELEASE(...) PENSTOCK_THREAD_ANNOTATION(release_capability(__VA_ARGS__))

namespace penstock {

// Thread-safe.
class PENSTOCK_CAPABILITY("mutex") Mutex {
 public:
  void lock() PENSTOCK_ACQUIRE() { mutex_.lock(); }
  void unlock() PENSTOCK_RELEASE() { mutex_.unlock(); }

 private:
  friend class Condition;
  std::mutex mutex_;
};

class PENSTOCK_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) PENSTOCK_ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() PENSTOCK_RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Thread-safe. The caller holds `mutex` around wait and re-tests its condition in a loop.
class Condition {
 public:
  void wait(Mutex& mutex) PENSTOCK_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }

  // Returns false when `deadline` passed before a notification.
  bool wait_until(Mutex& mutex, std::chrono::steady_clock::time_point deadline) PENSTOCK_REQUIRES(mutex) {
    std::unique_lock<std::mutex> lock(mutex.mutex_, std::adopt_lock);
    const bool notified = condition_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    lock.release();
    return notified;
  }

  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

}  // namespace penstock
