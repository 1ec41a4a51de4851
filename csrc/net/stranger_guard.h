// SPDX-License-Identifier: Apache-2.0
#pragma once
// Keeps those who only connect to a server from taking the descriptors of its process. libzmq accepts whoever connects
// and keeps a connection that says nothing for the whole time of a handshake. A thread hears of each connection that
// libzmq has accepted, holds it within a budget (connection_budget.h) until it has shown an allowed key, and closes
// those that are too many or too slow.
//
// A connection is closed by shutting down a duplicate of its descriptor, which libzmq then finds to have ended.
// libzmq's own number will not do: libzmq may have closed it meanwhile, and a file of the dataset may have it by then.
//
// libzmq does not tell whose handshake has succeeded. The system does: it counts the bytes that the server has sent on
// each connection, and those of a handshake's steps have a fixed size. A connection is asked for that in the moment in
// which it would be closed, so one that has shown an allowed key is not.
//
// A thread of its own, and not that which checks keys: a handshake must not wait for the closing of ten thousand
// strangers. nftables or a proxy in front would need rights or a second copy of each byte.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>

#include "base/event_loop.h"
#include "base/file_descriptor.h"
#include "base/result.h"
#include "net/connection_budget.h"
#include "net/connection_monitor.h"
#include "net/socket.h"

namespace penstock::net {

// How many bytes a server has sent at least to a peer that has come so far.
struct HandshakeBytes {
  uint64_t greeting;  // it has received the peer's first bytes
  uint64_t knowing;   // the peer knows the server's key
  uint64_t let_in;    // the handshake is over
};
// libzmq begins with 10 bytes and goes on, up to 64, once it has received as many. A command has two bytes in front of
// it. With CURVE follow WELCOME, 168 bytes, and READY, 65 or more, or ERROR, 10; a threshold lies between the last two.
// With a ticket (PLAIN) WELCOME is 8 bytes, which the ticket's holder alone is sent, and READY 41 or more.
constexpr HandshakeBytes kCurveHandshake{.greeting = 11, .knowing = 64 + 170, .let_in = 64 + 170 + 28};
constexpr HandshakeBytes kTicketHandshake{.greeting = 11, .knowing = 64 + 28, .let_in = 64 + 28};

// Destroyed before the socket that it watches. Thread-safe.
class StrangerGuard final : private EventLoop::Handler {
 public:
  // Watches a ZeroMQ socket that is not bound yet. Its limits follow from how many files this process may have open and
  // how many share them, as ConnectionBudget::limits_under() has it.
  static Result<std::unique_ptr<StrangerGuard>> start(SocketContext& context, void* watched,
                                                      const HandshakeBytes& bytes, size_t sharer_count);

  // For `start`.
  StrangerGuard(SocketContext& context, void* watched, const HandshakeBytes& bytes, size_t sharer_count);
  ~StrangerGuard() override { loop_.stop(); }

  // Why strangers are closed no more, if the thread has failed.
  Result<void> health() const { return loop_.health(); }

 private:
  Result<void> begin() override;
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void end() override;

  Result<void> take(const ListenerEvent& event, Instant now);
  Result<void> keep_listener(int fd);
  void take_in(int fd, Instant now);
  // A duplicate of a descriptor of libzmq's, for which connections of the budget go if the process has no other.
  FileDescriptor duplicate(int fd);
  // Closes a connection of the budget, unless it is further than the budget has it. Then that is noted.
  void judge(int fd);
  void forget(int fd);
  // How many bytes were sent on a connection, if this system counts them.
  std::optional<uint64_t> progress(int own);
  // For a process that has no descriptor left: close a connection that libzmq has accepted, and the next one that it
  // cannot accept.
  void close_at_once(int fd);
  void turn_away();

  SocketContext& context_;
  void* const watched_;
  const HandshakeBytes bytes_;
  // Of the thread from here to the budget's.
  std::unique_ptr<ListenerMonitor> monitor_;
  FileDescriptor listener_;
  uint16_t port_ = 0;
  // For a process that has no other left: one whose number is never given up, and one to accept with, which libzmq may
  // be faster to take.
  FileDescriptor slot_;
  FileDescriptor spare_;
  ConnectionBudget budget_;
  std::map<int, FileDescriptor> own_;  // duplicates, by the number that the budget and libzmq have
  bool counts_bytes_ = false;          // this system does
  Instant swept_at_{};

  EventLoop loop_;
};

}  // namespace penstock::net
