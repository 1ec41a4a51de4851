// SPDX-License-Identifier: Apache-2.0
#pragma once
// Wakes a thread that sleeps in poll(). A wake costs a system call only while that thread sleeps.

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

#include "base/file_descriptor.h"

namespace penstock {

// Thread-safe, but for the two calls of the thread that sleeps.
//
// That thread calls begin_sleep(), looks once more for work that others left, and polls fd() with its other descriptors
// if there is none. Others leave work and then call wake(). Both orders of the two are sequentially consistent, so
// either the last look finds the work, or wake() finds the sleeper.
class Waker {
 public:
  Waker() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;

  // False where the process has no descriptor left; errno says so after the constructor.
  explicit operator bool() const { return static_cast<bool>(fd_); }
  // Readable once the sleeper was woken.
  int fd() const { return fd_.get(); }

  void wake() {
    if (is_awake_.exchange(true)) return;
    const uint64_t one = 1;
    static_cast<void>(!::write(fd_.get(), &one, sizeof one));
  }

  void begin_sleep() { is_awake_.store(false); }
  // `is_readable`: fd() was found to be.
  void end_sleep(bool is_readable) {
    is_awake_.store(true);
    if (!is_readable) return;
    uint64_t count = 0;
    static_cast<void>(!::read(fd_.get(), &count, sizeof count));
  }

 private:
  const FileDescriptor fd_;
  std::atomic<bool> is_awake_{true};
};

}  // namespace penstock
