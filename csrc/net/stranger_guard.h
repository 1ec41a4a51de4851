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
// A connection that says nothing stays with the system for a time (kSilentTime), which passes it to libzmq once its
// first bytes have come: every peer of ours begins with some. So it takes neither a descriptor nor a thread's time, and
// is not made again because it was closed. The system keeps as many of them at a port as may wait to be accepted
// (ZMQ_BACKLOG), and passes on at once whoever connects beyond that.
//
// libzmq does not tell whose handshake has succeeded. The system does: it counts the bytes that the server has sent on
// each connection, and those of a handshake's steps have a fixed size. A connection is asked for that in the moment in
// which it would be closed, so one that has shown an allowed key is not.
//
// A thread of its own, and not that which checks keys: a handshake must not wait for the closing of ten thousand
// strangers. nftables or a proxy in front would need rights or a second copy of each byte.
//
// Those that were let in are held within a budget of their own (holder_budget.h), from the moment in which that is
// found out. No duplicate is kept of these, which would double the descriptors of a pool: one is taken when a
// connection is to be closed, and looked at whether it is still that of the same peer.

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

// For how long the system keeps a connection that has not sent its first bytes. It counts in attempts to have the peer
// answer, after 1, 2, 4, 8 and 16 seconds, and then hands it over as it is.
constexpr auto kSilentTime = std::chrono::seconds(31);

// What a port may have of its process.
struct PortUse {
  size_t sharer_count = 1;  // of servers of this kind in the process, this one included, which share the room
  HolderRoom holders{};
};

// Destroyed before the socket that it watches. Thread-safe.
class StrangerGuard final : private EventLoop::Handler {
 public:
  // Watches a ZeroMQ socket that is not bound yet. Its limits follow from how many files this process may have open and
  // how many share them, as ConnectionBudget::limits_under() has it.
  static Result<std::unique_ptr<StrangerGuard>> start(SocketContext& context, void* watched,
                                                      const HandshakeBytes& bytes, const PortUse& use);

  // For `start`.
  StrangerGuard(SocketContext& context, void* watched, const HandshakeBytes& bytes, const PortUse& use);
  ~StrangerGuard() override { loop_.stop(); }

  // Why strangers are closed no more, if the thread has failed.
  Result<void> health() const { return loop_.health(); }

  // A message has come over the connection that has, or had, this descriptor of libzmq's, from the holder of `key`.
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
  // A duplicate of a descriptor of libzmq's, for which connections of the budget go if the process has no other.
  FileDescriptor duplicate(int fd);
  // Closes a connection of the budget, unless it is further than the budget has it. Then that is noted.
  void judge(int fd);
  // It has ended, or nothing is known of it.
  void forget(int fd);
  // One of the budget has shown its key.
  void let_in(int fd);
  void take_note(const Note& note);
  // Closes those that are too many after this one was let in, or has spoken.
  void make_room(int fd);
  void close_holder(int fd);
  static std::optional<Peer> peer_of(int fd);
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
  HolderBudget holders_;
  std::map<int, FileDescriptor> own_;  // duplicates, by the number that the budget and libzmq have
  std::map<int, Peer> peers_;          // of the connections of both budgets
  std::vector<Note> taken_notes_;      // which are carried out once all events that came before them are
  bool counts_bytes_ = false;          // this system does
  Instant swept_at_{};

  Mutex mutex_;
  std::vector<Note> notes_ PENSTOCK_GUARDED_BY(mutex_);
  EventLoop loop_;
};

}  // namespace penstock::net
