// SPDX-License-Identifier: Apache-2.0
#pragma once
// The state that the ZeroMQ sockets of a process share.

#include <memory>
#include <string>

#include "base/result.h"

namespace penstock::net {

// The version of libzmq in this process, such as "4.3.4".
std::string zmq_version();

// A ZeroMQ context: its I/O thread starts with it, so it is created after the last fork and never used in a forked
// child.
// Thread-safe.
class SocketContext {
 public:
  // Starts ZeroMQ's threads. kNoMemory if the process has no descriptors left for them; libzmq would abort the process.
  static Result<std::unique_ptr<SocketContext>> open();

  // For `open`, and for tests, which have descriptors left.
  SocketContext();
  SocketContext(const SocketContext&) = delete;
  SocketContext& operator=(const SocketContext&) = delete;
  ~SocketContext();

  // For this room's files that call ZeroMQ.
  void* handle() const { return context_; }

 private:
  void* context_;
};

}  // namespace penstock::net
