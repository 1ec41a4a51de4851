// SPDX-License-Identifier: Apache-2.0
#pragma once
// A pointer to an object that belongs to one process: threads, sockets, locks. A forked child inherits the bytes but
// none of the threads, so destroying its copy would join a thread that does not exist or use the parent's sockets. In
// any process other than the creator, the object is left alone and dies with the process.

#include <unistd.h>

#include <memory>

namespace penstock {

// Thread-compatible.
template <typename T>
class ProcessBound {
 public:
  ProcessBound(std::unique_ptr<T> object) : object_(std::move(object)), owner_pid_(::getpid()) {}
  ProcessBound(const ProcessBound&) = delete;
  ProcessBound& operator=(const ProcessBound&) = delete;
  ~ProcessBound() {
    if (!is_owner()) static_cast<void>(object_.release());
  }

  bool is_owner() const { return owner_pid_ == ::getpid(); }
  T* operator->() const { return object_.get(); }
  T& operator*() const { return *object_; }

 private:
  std::unique_ptr<T> object_;
  pid_t owner_pid_;
};

}  // namespace penstock
