// SPDX-License-Identifier: Apache-2.0
#pragma once
// File descriptors: one with an owner that closes it, and one that wakes a thread that sleeps in poll().

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <utility>

namespace penstock {

// An open file descriptor with one owner. Thread-compatible.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~FileDescriptor() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }

  void reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

// Wakes a thread that sleeps in poll(). A wake costs a system call only while that thread sleeps. Thread-safe, except
// the three calls of the sleeping thread.
//
// That thread takes turns. It calls begin_turn(), looks for work that others left, and calls begin_sleep(); if that
// returns true, it polls fd() with its other descriptors, and then calls end_sleep(). Other threads leave work and then
// call wake(). The turn finds the work of a wake before begin_turn(); a wake at any point after it keeps the thread
// from sleeping or wakes it.
class Waker {
 public:
  Waker() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}
  Waker(const Waker&) = delete;
  Waker& operator=(const Waker&) = delete;

  // False if the process has no descriptor left; errno is then set after the constructor.
  explicit operator bool() const { return static_cast<bool>(fd_); }
  // Readable once the sleeper was woken.
  int fd() const { return fd_.get(); }

  void wake() {
    if (state_.exchange(State::kWoken) != State::kAsleep) return;
    const uint64_t one = 1;
    static_cast<void>(!::write(fd_.get(), &one, sizeof one));
  }

  void begin_turn() { state_.exchange(State::kAwake); }  // also reads: work that was left before a wake is visible
  // Whether the thread may sleep: it was not woken in this turn.
  bool begin_sleep() {
    State expected = State::kAwake;
    return state_.compare_exchange_strong(expected, State::kAsleep);
  }
  // `is_readable`: whether poll() found fd() readable.
  void end_sleep(bool is_readable) {
    if (!is_readable) return;
    uint64_t count = 0;
    static_cast<void>(!::read(fd_.get(), &count, sizeof count));
  }

 private:
  enum class State : uint8_t { kAwake, kWoken, kAsleep };

  const FileDescriptor fd_;
  std::atomic<State> state_{State::kAwake};
};

}  // namespace penstock
