// SPDX-License-Identifier: Apache-2.0
#pragma once
// Synchronisation of threads: a mutex and a condition variable for Clang's thread-safety analysis, a board that shows
// the latest value to other threads, and a queue between two threads. Condition variables live only in base/.

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <mutex>
#include <optional>
#include <utility>

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

// Publishes the latest value that one thread knows to other threads. Thread-safe.
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

// A queue between two threads that holds at most `capacity` items. Shutdown propagates by closing it: push() then
// returns false, and pop() returns the remaining items and then none. Thread-safe.
template <typename T>
class BoundedQueue {
 public:
  explicit BoundedQueue(size_t capacity) : capacity_(capacity) {}

  // Blocks while the queue is full. Returns false, dropping `item`, when the queue is closed.
  bool push(T item) {
    {
      MutexLock lock(mutex_);
      while (items_.size() >= capacity_ && !closed_) not_full_.wait(mutex_);
      if (closed_) return false;
      items_.push_back(std::move(item));
    }
    not_empty_.notify_one();
    return true;
  }

  // Returns false, leaving `item` as it was, when the queue is full or closed.
  bool try_push(T& item) {
    {
      MutexLock lock(mutex_);
      if (closed_ || items_.size() >= capacity_) return false;
      items_.push_back(std::move(item));
    }
    not_empty_.notify_one();
    return true;
  }

  std::optional<T> try_pop() {
    std::optional<T> item;
    {
      MutexLock lock(mutex_);
      if (items_.empty()) return std::nullopt;
      item.emplace(std::move(items_.front()));
      items_.pop_front();
    }
    not_full_.notify_one();
    return item;
  }

  // Blocks until there is an item, the queue is closed and empty, or `deadline` passes.
  std::optional<T> pop_until(std::chrono::steady_clock::time_point deadline) {
    std::optional<T> item;
    {
      MutexLock lock(mutex_);
      while (items_.empty() && !closed_) {
        if (!not_empty_.wait_until(mutex_, deadline) && items_.empty()) return std::nullopt;
      }
      if (items_.empty()) return std::nullopt;
      item.emplace(std::move(items_.front()));
      items_.pop_front();
    }
    not_full_.notify_one();
    return item;
  }

  // Blocks until there is an item, the queue is closed, or `deadline` passes. True when there is an item.
  bool wait_until(std::chrono::steady_clock::time_point deadline) {
    MutexLock lock(mutex_);
    while (items_.empty() && !closed_) {
      if (!not_empty_.wait_until(mutex_, deadline)) break;
    }
    return !items_.empty();
  }

  void close() {
    {
      MutexLock lock(mutex_);
      closed_ = true;
    }
    not_empty_.notify_all();
    not_full_.notify_all();
  }

  bool is_closed() const {
    MutexLock lock(mutex_);
    return closed_;
  }

  size_t size() const {
    MutexLock lock(mutex_);
    return items_.size();
  }

 private:
  const size_t capacity_;
  mutable Mutex mutex_;
  Condition not_empty_;
  Condition not_full_;
  std::deque<T> items_ PENSTOCK_GUARDED_BY(mutex_);
  bool closed_ PENSTOCK_GUARDED_BY(mutex_) = false;
};

}  // namespace penstock
