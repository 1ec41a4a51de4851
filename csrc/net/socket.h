// SPDX-License-Identifier: Apache-2.0
#pragma once
// The sockets of a local pool. A Socket is one DEALER over ipc in the abstract namespace; connections of other users
// are refused by the kernel's credentials, and one that has ended is not made again. High-water marks are off: memory
// is bounded because a trainer has a limited number of requests outstanding, and every message answers one. (ZeroMQ's
// own marks count messages, not bytes, and drop or block where we need neither.)

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "net/readiness.h"

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

using MessageParts = std::vector<std::vector<std::byte>>;

// Confined to the thread that made it.
class Socket {
 public:
  static Result<std::unique_ptr<Socket>> bind(SocketContext& context, const std::string& name);
  // Once, to a name that is bound: one at which nobody listens leaves the socket without a peer.
  static Result<std::unique_ptr<Socket>> connect(SocketContext& context, const std::string& name);

  explicit Socket(void* socket) : socket_(socket) {}
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  ~Socket();

  // Sends one message of the given parts without blocking. kClosed when no peer is connected.
  Result<void> send(std::span<const std::span<const std::byte>> parts);
  Result<void> send(std::span<const std::byte> only_part) { return send({&only_part, 1}); }

  // Receives into `parts`, whose buffers are used again. Returns false when no message is waiting.
  Result<bool> try_receive(MessageParts& parts);

  // Whether a peer is connected. Once it is not, everything that it had sent can be received.
  bool has_peer() const;

  // Waits until a peer is connected and has room, or `timeout` passes. Blocks.
  Result<void> wait_writable(std::chrono::milliseconds timeout);

  Waitable waitable() const { return Waitable(socket_); }

  // As `wait_readable`, for sockets of this kind alone.
  static Result<void> wait(std::span<Socket* const> sockets, std::span<const int> fds, std::span<bool> is_fd_readable,
                           std::chrono::milliseconds timeout);

 private:
  void* socket_;
};

}  // namespace penstock::net
