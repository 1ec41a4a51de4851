// SPDX-License-Identifier: Apache-2.0
#pragma once
// What the sockets of ZeroMQ in a process share.

#include <memory>
#include <string>

#include "base/result.h"

namespace penstock::net {

// The version of libzmq in this process, such as "4.3.4".
std::string zmq_version();

// A ZeroMQ context: its I/O thread starts with it, so it is made after the last fork and never used in a forked child.
// Thread-safe.
class SocketContext {
 public:
  // Starts ZeroMQ's threads. kNoMemory where the process has no descriptors left for them, which would end it: libzmq
  // aborts there.
  static Result<std::unique_ptr<SocketContext>> open();

  // For `open`, and for tests, which have descriptors left.
  SocketContext();
  SocketContext(const SocketContext&) = delete;
  SocketContext& operator=(const SocketContext&) = delete;
  ~SocketContext();

  // For the files of this room that speak to ZeroMQ.
  void* handle() const { return context_; }

 private:
  void* context_;
};

}  // namespace penstock::net
