// SPDX-License-Identifier: Apache-2.0
#pragma once
// A queue between two threads that holds at most `capacity` items. Shutdown propagates by closing it: push() then
// returns false, and pop() returns the remaining items and then none.

#include <chrono>
#include <cstddef>
#include <deque>
#include <optional>
#include <utility>

#include "base/mutex.h"

namespace penstock {

// Thread-safe.
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
