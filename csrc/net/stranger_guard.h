// SPDX-License-Identifier: Apache-2.0
#pragma once
// StrangerGuard, which prevents peers that merely connect to a server from exhausting the descriptors of its process,
// and the two budgets by which it decides: ConnectionBudget for connections that have shown no allowed key,
// HolderBudget for admitted ones. The budgets only decide; they own no connections.

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/event_loop.h"
#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "base/result.h"
#include "net/socket.h"

namespace penstock::net {

// The handshake progress of a connection that has not shown an allowed key.
enum class HandshakeStage : uint8_t {
  kSilent,    // it has not sent the first bytes of ZeroMQ's protocol
  kGreeting,  // it has sent them
  kKeyKnown,  // it has shown that it knows the server's key
};
constexpr size_t kHandshakeStageCount = 3;

// For each stage, the time after a connection was accepted by which it must have reached the next stage. Half of that
// while more than three quarters of the stage's room are taken.
constexpr std::array<std::chrono::milliseconds, kHandshakeStageCount> kStageTimes = {
    std::chrono::milliseconds(2000), std::chrono::milliseconds(3000), std::chrono::milliseconds(5000)};

// The room of a stage at one server: a sixteenth of the process's descriptor limit, within these bounds. A connection
// takes two descriptors, and a worker has two servers, one of which has two stages: at least three eighths of the
// descriptors remain, regardless of the number of strangers, except for connections that libzmq accepts before the
// guard's thread runs. Workers that share a process share that sixteenth; the minimum is for each.
constexpr size_t kStageConnectionsMax = 128;
constexpr size_t kStageConnectionsMin = 4;
constexpr uint64_t kDescriptorsForEach = 16;
// The share of one address: room / kAddressPart.
constexpr size_t kAddressPart = 2;

// Decides which connections a server closes to make room: among the connections that have shown no key, the oldest one
// of the address that has the most. Each stage of a handshake has separate room, so connections that send no bytes do
// not displace connections that make progress.
//
// Closing the oldest connection and not the newest serves honest peers that share an address with a stranger, such as
// loopback: they reach the next stage within milliseconds, and the connections that stay behind are closed.
//
// Thread-compatible.
class ConnectionBudget {
 public:
  struct Limits {
    size_t stage_count_max = kStageConnectionsMax;
    size_t address_count_max = kStageConnectionsMax / kAddressPart;  // in a stage
  };
  // `sharer_count`: the number of workers that have a server of this kind in this process.
  static Limits limits_under(uint64_t descriptor_limit, size_t sharer_count = 1);

  // The address of a peer. IPv4 addresses are mapped to IPv6; of IPv6 only the first 64 bits count, as a peer has a
  // whole network.
  using Address = std::array<uint8_t, 16>;

  explicit ConnectionBudget(const Limits& limits) : limits_(limits) {}

  // A connection was accepted. `id` is unique among the connections here.
  void add(int id, const Address& address, Instant now);
  // The connection has reached a later stage.
  void advance(int id, HandshakeStage stage);
  // The connection has ended, or shown its key.
  void remove(int id);

  bool has(int id) const { return places_.contains(id); }
  bool is_empty() const { return places_.empty(); }
  HandshakeStage stage_of(int id) const { return places_.at(id).stage; }

  // The connection to close, unless it has meanwhile reached a later stage, because there are too many. None if there
  // is room for all.
  std::optional<int> surplus() const;
  // The connection to close first if any must be closed.
  std::optional<int> first() const;
  // The connections whose time in their stage is over.
  std::vector<int> overdue(Instant now) const;

 private:
  struct Connection {
    int id;
    Instant accepted_at;
  };
  using Queue = std::deque<Connection>;  // in the order in which they reached the stage
  struct Stage {
    std::map<Address, Queue> queues;  // none is empty
    size_t count = 0;
  };
  struct Place {
    HandshakeStage stage;
    Address address;
    Instant accepted_at;
  };

  Stage& at(HandshakeStage stage) { return stages_[static_cast<size_t>(stage)]; }
  void put(int id, const Place& place);
  // The longest queue of a non-empty stage; of equally long ones, the queue whose first connection is oldest.
  static const Queue& longest_of(const Stage& stage);

  const Limits limits_;
  std::array<Stage, kHandshakeStageCount> stages_;
  std::map<int, Place> places_;  // by id
};

// Connections that have sent no message have 1 / kQuietPart of a server's room, and one address 1 / kAddressPart of
// that. One key has 1 / kKeyPart of the rest.
constexpr size_t kQuietPart = 4;
constexpr size_t kKeyPart = 2;
constexpr size_t kHoldersMin = 16;

// The room of one server: `count_max` connections, but at most one for every `descriptors_for_each` of the process's
// descriptor limit. A worker's servers use an eighth and a sixteenth of the descriptors, in addition to five eighths
// for strangers (kStageConnectionsMax), so three sixteenths remain.
struct HolderRoom {
  size_t count_max = 1024;
  uint64_t descriptors_for_each = 8;
};

// Decides which admitted connections a server closes to make room. If there are too many, the key with the most
// connections loses its oldest, so a key's holder may connect any number of times without locking others out.
//
// libzmq identifies the key of a connection only with its first message. Connections without a message have separate
// room until they send one; the address with the most of them loses its oldest, as peers send as soon as they are
// admitted.
//
// Thread-compatible.
class HolderBudget {
 public:
  struct Limits {
    size_t known_count_max;
    size_t key_count_max;
    size_t quiet_count_max;
    size_t quiet_address_count_max;
  };
  static Limits limits_under(uint64_t descriptor_limit, const HolderRoom& room);

  using Address = ConnectionBudget::Address;

  explicit HolderBudget(const Limits& limits) : limits_(limits) {}

  // A connection was admitted that has sent no message yet. `id` is unique among the connections here.
  void add(int id, const Address& address);
  // The connection has sent a message; `key` is the key that it had shown.
  void speak(int id, std::string_view key);
  // The connection has ended.
  void remove(int id);

  bool has(int id) const { return places_.contains(id); }
  size_t count() const { return places_.size(); }

  // The connection to close after `id` was added or has spoken. None if there is room for all.
  std::optional<int> surplus(int id) const;

 private:
  using Queue = std::map<uint64_t, int>;  // connections by the order in which they were added
  struct Part {
    std::map<std::string, Queue> queues{};  // by key, or by the bytes of the address; no queue is empty
    size_t count = 0;
  };
  struct Place {
    bool is_quiet;
    std::string group;
    uint64_t order;
  };

  Part& part_of(const Place& place) { return place.is_quiet ? quiet_ : known_; }
  void put(int id, Place place);
  // The oldest of the longest queue of a non-empty part; of equally long ones, the queue whose first connection is
  // oldest.
  static int first_of_longest(const Part& part);

  const Limits limits_;
  Part quiet_;
  Part known_;
  std::map<int, Place> places_;  // by id
  uint64_t added_count_ = 0;
};

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

// Prevents peers that merely connect to a server from exhausting the descriptors of its process. libzmq accepts every
// connection and keeps a silent one for the whole handshake timeout. A separate thread is notified of each connection
// that libzmq has accepted, keeps it within a ConnectionBudget until it has shown an allowed key, and closes
// connections that are too many or too slow.
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
// Admitted connections are kept within a HolderBudget, from the moment when their admission is detected. They have no
// permanent duplicates, which would double the descriptors of a pool: a duplicate is made when a connection is to be
// closed, and checked to belong to the same peer still.
//
// Destroyed before the socket that it watches. Thread-safe.
class StrangerGuard final : private EventLoop::Handler {
 public:
  // Watches a ZeroMQ socket that is not bound yet. Its limits are derived from the process's descriptor limit and the
  // number of servers that share it, as in ConnectionBudget::limits_under().
  static Result<std::unique_ptr<StrangerGuard>> start(SocketContext& context, zmq::socket_ref watched,
                                                      const HandshakeBytes& bytes, const PortUse& use);

  // For `start`.
  StrangerGuard(SocketContext& context, zmq::socket_ref watched, const HandshakeBytes& bytes, const PortUse& use);
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
  const zmq::socket_ref watched_;
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
