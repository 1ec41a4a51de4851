// SPDX-License-Identifier: Apache-2.0
#pragma once
// Prevents peers that merely connect to a server from exhausting the descriptors of its process. libzmq accepts every
// connection and keeps a silent one for the whole handshake timeout. A separate thread is notified of each connection
// that libzmq has accepted, keeps it within a budget (connection_budget.h) until it has shown an allowed key, and
// closes connections that are too many or too slow.
//
// A connection is closed by shutting down a duplicate of its descriptor, which libzmq then finds to have ended.
// libzmq's number cannot be used: libzmq may have closed it in the meantime, and a file of the dataset may have it by
// then.
//
// The system keeps a silent connection for a time (kSilentTime), and passes it to libzmq once its first bytes have
// arrived: every peer of ours sends some first. Such a connection takes neither a descriptor nor a thread's time, and
// is not reopened because it was closed. The system keeps at most as many of them at a port as may wait to be accepted
// (ZMQ_BACKLOG), and passes on further connections immediately.
//
// libzmq does not identify connections whose handshake has succeeded. The system does: it counts the bytes that the
// server has sent on each connection, and the steps of a handshake have fixed sizes. This is checked at the moment when
// a connection would be closed, so a connection that has shown an allowed key is not closed.
//
// The thread is not the one that checks keys: a handshake must not wait until ten thousand strangers are closed.
// nftables or a proxy in front would need privileges or a second copy of each byte.
//
// Admitted connections are kept within a separate budget (holder_budget.h), from the moment when their admission is
// detected. They have no permanent duplicates, which would double the descriptors of a pool: a duplicate is made when a
// connection is to be closed, and checked to belong to the same peer still.

#include <array>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/event_loop.h"
#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/result.h"
#include "net/connection_budget.h"
#include "net/connection_monitor.h"
#include "net/holder_budget.h"
#include "net/socket.h"

namespace penstock::net {

// The minimum number of bytes that a server has sent to a peer at each step.
struct HandshakeBytes {
  uint64_t greeting;  // it has received the peer's first bytes
  uint64_t knowing;   // the peer knows the server's key
  uint64_t let_in;    // the handshake is over
};
// libzmq first sends 10 bytes and continues, up to 64, once it has received as many. A command has a prefix of two
// bytes. With CURVE follow WELCOME, 168 bytes, and READY, 65 or more, or ERROR, 10; the threshold is between the last
// two. With a ticket (PLAIN) WELCOME is 8 bytes, which is sent only to the ticket's holder, and READY 41 or more.
constexpr HandshakeBytes kCurveHandshake{.greeting = 11, .knowing = 64 + 170, .let_in = 64 + 170 + 28};
constexpr HandshakeBytes kTicketHandshake{.greeting = 11, .knowing = 64 + 28, .let_in = 64 + 28};

// How long the system keeps a connection that has not sent its first bytes. The system counts attempts to get an answer
// from the peer, after 1, 2, 4, 8 and 16 seconds, and then passes the connection on as it is.
constexpr auto kSilentTime = std::chrono::seconds(31);

// The share of a process's resources that a port may use.
struct PortUse {
  size_t sharer_count = 1;  // of servers of this kind in the process, including this one, which share the room
  HolderRoom holders{};
};

// Destroyed before the socket that it watches. Thread-safe.
class StrangerGuard final : private EventLoop::Handler {
 public:
  // Watches a ZeroMQ socket that is not bound yet. Its limits are derived from the process's descriptor limit and the
  // number of servers that share it, as in ConnectionBudget::limits_under().
  static Result<std::unique_ptr<StrangerGuard>> start(SocketContext& context, void* watched,
                                                      const HandshakeBytes& bytes, const PortUse& use);

  // For `start`.
  StrangerGuard(SocketContext& context, void* watched, const HandshakeBytes& bytes, const PortUse& use);
  ~StrangerGuard() override { loop_.stop(); }

  // Why strangers are no longer closed, if the thread has failed.
  Result<void> health() const { return loop_.health(); }

  // A message from the holder of `key` was received on the connection that has, or had, this descriptor in libzmq.
  void note_holder(int fd, std::string_view key);

 private:
  // The address and the port of a peer, which no other connection to this server has at the same time.
  using PeerName = std::array<uint8_t, 18>;
  struct Peer {
    ConnectionBudget::Address address;
    PeerName name;
  };
  struct Note {
    int fd;
    PeerName name;
    std::string key;
  };

  Result<void> begin() override;
  Result<void> serve() override;
  Result<bool> wait(int wake_fd, bool may_sleep) override;
  void end() override;

  Result<void> take(const ListenerEvent& event, Instant now);
  Result<void> keep_listener(int fd);
  void take_in(int fd, Instant now);
  // Duplicates a descriptor of libzmq's; closes connections of the budget if the process has no descriptor left.
  FileDescriptor duplicate(int fd);
  // Closes a connection of the budget, unless it has made progress that the budget does not know, which is then
  // recorded.
  void judge(int fd);
  // The connection has ended, or its progress is unknown.
  void forget(int fd);
  // A connection of the budget has shown its key.
  void let_in(int fd);
  void take_note(const Note& note);
  // Closes surplus connections after this one was admitted or has spoken.
  void make_room(int fd);
  void close_holder(int fd);
  static std::optional<Peer> peer_of(int fd);
  // The number of bytes sent on a connection, if this system counts them.
  std::optional<uint64_t> progress(int own);
  // For a process that has no descriptor left: closes a connection that libzmq has accepted, and the next one that it
  // cannot accept.
  void close_at_once(int fd);
  void turn_away();

  SocketContext& context_;
  void* const watched_;
  const HandshakeBytes bytes_;
  // From here to the budgets, confined to the loop's thread.
  std::unique_ptr<ListenerMonitor> monitor_;
  FileDescriptor listener_;
  uint16_t port_ = 0;
  // For a process that has no other left: `slot_` keeps its number permanently, and `spare_` is used to accept; libzmq
  // may take its number first.
  FileDescriptor slot_;
  FileDescriptor spare_;
  ConnectionBudget budget_;
  HolderBudget holders_;
  std::map<int, FileDescriptor> own_;  // duplicates, by the number that the budget and libzmq use
  std::map<int, Peer> peers_;          // of the connections of both budgets
  std::vector<Note> taken_notes_;      // applied after all events that precede them
  bool counts_bytes_ = false;          // whether this system counts bytes
  Instant swept_at_{};

  Mutex mutex_;
  std::vector<Note> notes_ PENSTOCK_GUARDED_BY(mutex_);
  EventLoop loop_;
};

}  // namespace penstock::net
