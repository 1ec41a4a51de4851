// SPDX-License-Identifier: Apache-2.0
#pragma once
// The part of ZeroMQ that all its sockets here need, through cppzmq: SocketContext, the state that the sockets of a
// process share; waiting for a few sockets or, with a ReadySet, for many; and monitors of their connections' events.
// cppzmq throws zmq::error_t for failures that occur in a healthy system; try_zmq() makes them Results.

#include <zmq.hpp>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "base/result.h"

namespace penstock::net {

// A ZeroMQ context: its I/O thread starts with it, so it is created after the last fork and never used in a forked
// child. Thread-safe.
class SocketContext {
 public:
  // Starts ZeroMQ's threads. kNoMemory if the process has no descriptors left for them; libzmq would abort the process.
  static Result<std::unique_ptr<SocketContext>> open();

  // For `open`, and for tests, which have descriptors left.
  SocketContext();
  SocketContext(const SocketContext&) = delete;
  SocketContext& operator=(const SocketContext&) = delete;
  ~SocketContext() = default;

  // For this room's files that call ZeroMQ.
  zmq::context_t& zmq() { return context_; }

 private:
  zmq::context_t context_;
};

// The version of libzmq in this process, such as "4.3.4".
std::string zmq_version();

// Runs `call`, again if a signal interrupted it. kFailed, "`what` failed: " with libzmq's reason, for any other error.
template <typename Call>
Result<void> try_zmq(std::string_view what, const Call& call) {
  while (true) {
    try {
      call();
      return {};
    } catch (const zmq::error_t& error) {
      if (error.num() != EINTR) return Fault{Errc::kFailed, std::string(what) + " failed: " + error.what()};
    }
  }
}

// A ZeroMQ socket to wait for. It does not own the socket and supports no other operation on it. Thread-compatible.
class Waitable {
 public:
  explicit Waitable(zmq::socket_ref socket) : socket_(socket) {}

 private:
  friend class ReadySet;
  friend Result<void> wait_readable(std::span<const Waitable> sockets, std::span<const int> fds,
                                    std::span<bool> is_fd_readable, std::chrono::milliseconds timeout);
  zmq::socket_ref socket_;
};

// Waits until one of `sockets` or of `fds` is readable, or `timeout` passes (negative: forever). Blocks. Readable fds
// are marked in `is_fd_readable`, which has one element for each. A signal ends the wait early.
Result<void> wait_readable(std::span<const Waitable> sockets, std::span<const int> fds, std::span<bool> is_fd_readable,
                           std::chrono::milliseconds timeout);

// Waits for many ZeroMQ sockets of which few have an event at a time. Each is added once, so the cost of a wait grows
// with the number of events and not of sockets.
//
// A socket's descriptor (ZMQ_FD) signals that an event occurred, and not that a message waits. Each use of the socket
// consumes the signal: after receiving the first of several messages, or sending one, the descriptor may be silent
// while messages wait. It is reliable from the moment that ZMQ_EVENTS reports no waiting message until the next use of
// the socket: a message that arrives in that time makes it readable.
//
// Invariant: `wait` sleeps only if every socket was queried for its events after its last use, and none had a message.
// The following count as used: newly added sockets, sockets that the last `wait` returned, and sockets marked as used.
// Only these are queried.
//
// Confined to the thread that uses the sockets.
class ReadySet {
 public:
  static Result<std::unique_ptr<ReadySet>> open();

  // For `open`.
  explicit ReadySet(FileDescriptor epoll) : epoll_(std::move(epoll)) {}
  ReadySet(const ReadySet&) = delete;
  ReadySet& operator=(const ReadySet&) = delete;

  // Adds sockets that are served together, or a plain descriptor. Returns the tag by which `wait` reports them; tags
  // are never reused.
  Result<uint64_t> add(std::span<const Waitable> sockets);
  Result<uint64_t> add(int fd);

  // Whether `wait` also reports this plain descriptor when it is writable.
  Result<void> watch_output(uint64_t tag, bool is_watched);

  // Call it before the first of them is closed: the number of a closed descriptor is soon reused. Closing does not
  // remove it, as libzmq closes it later, and a forked child may have a copy.
  void remove(uint64_t tag);

  // Marks the sockets of this tag as used although the last `wait` did not report them, usually because of a send.
  void mark_used(uint64_t tag);

  // Waits until a socket may be readable, or `timeout` passes (negative: forever). Blocks. Returns tags, each once,
  // valid until the next call. A socket that was not read completely is returned again by the next call, in addition to
  // sockets that have become readable since. A signal ends the wait early.
  Result<std::span<const uint64_t>> wait(std::chrono::milliseconds timeout);

 private:
  struct Member {
    std::vector<zmq::socket_ref> sockets;  // none for a plain descriptor
    std::vector<int> fds;
    bool is_used = false;
  };

  Result<uint64_t> add(Member member);
  Result<bool> has_input(const Member& member) const;

  const FileDescriptor epoll_;
  std::map<uint64_t, Member> members_;
  std::vector<uint64_t> used_;  // each once
  std::vector<uint64_t> ready_tags_;
  uint64_t next_tag_ = 1;
};

// The events of one ZeroMQ socket, from libzmq's socket monitor. Without it a client with a wrong key would retry
// forever without any report, and a server could not identify the connections of strangers. Destroyed before the socket
// that it watches. Confined to the thread that created it, which may differ from the socket's thread: libzmq locks
// their shared state.
class SocketMonitor {
 public:
  struct Event {
    uint16_t kind = 0;  // one of ZMQ_EVENT_*
    uint32_t value = 0;
  };
  // Watches a ZeroMQ socket that is neither bound nor connected yet, for events of `kinds`.
  static Result<std::unique_ptr<SocketMonitor>> watch(SocketContext& context, zmq::socket_ref watched, int kinds);

  // For `watch`.
  SocketMonitor(zmq::socket_t events, zmq::socket_ref watched) : events_(std::move(events)), watched_(watched) {}
  SocketMonitor(const SocketMonitor&) = delete;
  SocketMonitor& operator=(const SocketMonitor&) = delete;
  ~SocketMonitor();

  // Returns the next event, or none if there is none yet.
  std::optional<Event> try_event();

  Waitable waitable() { return Waitable(events_); }

 private:
  zmq::socket_t events_;
  zmq::socket_ref watched_;
};

struct ConnectionEvent {
  enum class Kind : uint8_t {
    kConnected,     // the handshake is over: the server has the expected key, and admits this client
    kDisconnected,  // after it was connected
    kRefused,       // during the handshake; `reason` explains why
  };
  Kind kind = Kind::kConnected;
  std::string reason = {};
  // Whether libzmq will not retry automatically.
  bool is_final = false;
};

// The events of a client's connection. Lifetime and thread as for SocketMonitor.
class ConnectionMonitor {
 public:
  static Result<std::unique_ptr<ConnectionMonitor>> watch(SocketContext& context, zmq::socket_ref watched);

  // For `watch`.
  explicit ConnectionMonitor(std::unique_ptr<SocketMonitor> monitor) : monitor_(std::move(monitor)) {}

  // Returns the next event, or none if there is none yet.
  std::optional<ConnectionEvent> try_event();

  Waitable waitable() const { return monitor_->waitable(); }

 private:
  std::optional<ConnectionEvent> read_event(const SocketMonitor::Event& event);

  std::unique_ptr<SocketMonitor> monitor_;
  bool is_connected_ = false;
};

struct ListenerEvent {
  enum class Kind : uint8_t {
    kListening,  // `value` is the descriptor on which libzmq listens
    kAccepted,   // `value` is the connection's descriptor, which libzmq may have closed since
    kRefused,    // the system had no connection for libzmq to accept; `value` is the error
    kEnded,      // `value` is the descriptor that the connection had
  };
  Kind kind = Kind::kListening;
  int value = 0;
};

// The events of a server. They do not identify connections whose handshake has succeeded: libzmq then names no
// connection. Lifetime and thread as for SocketMonitor.
class ListenerMonitor {
 public:
  static Result<std::unique_ptr<ListenerMonitor>> watch(SocketContext& context, zmq::socket_ref watched);

  // For `watch`.
  explicit ListenerMonitor(std::unique_ptr<SocketMonitor> monitor) : monitor_(std::move(monitor)) {}

  // Returns the next event, or none if there is none yet.
  std::optional<ListenerEvent> try_event();

  Waitable waitable() const { return monitor_->waitable(); }

 private:
  std::unique_ptr<SocketMonitor> monitor_;
};

}  // namespace penstock::net
