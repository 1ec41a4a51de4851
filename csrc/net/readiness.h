// SPDX-License-Identifier: Apache-2.0
#pragma once
// Waiting for several ZeroMQ sockets and file descriptors together.

#include <chrono>
#include <span>

#include "base/result.h"

namespace penstock::net {

// A ZeroMQ socket to wait for. It does not own the socket and supports no other operation on it.
// Thread-compatible.
class Waitable {
 public:
  explicit Waitable(void* socket) : socket_(socket) {}

 private:
  friend class ReadySet;
  friend Result<void> wait_readable(std::span<const Waitable> sockets, std::span<const int> fds,
                                    std::span<bool> is_fd_readable, std::chrono::milliseconds timeout);
  void* socket_;
};

// Waits until one of `sockets` or of `fds` is readable, or `timeout` passes (negative: forever). Blocks. Readable fds
// are marked in `is_fd_readable`, which has one element for each. A signal ends the wait early.
Result<void> wait_readable(std::span<const Waitable> sockets, std::span<const int> fds, std::span<bool> is_fd_readable,
                           std::chrono::milliseconds timeout);

}  // namespace penstock::net
