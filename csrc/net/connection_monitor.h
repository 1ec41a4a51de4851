// SPDX-License-Identifier: Apache-2.0
#pragma once
// Connection events, from libzmq's socket monitor. Without it a client with a wrong key would retry forever without any
// report, and a server could not identify the connections of strangers.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/result.h"
#include "net/readiness.h"
#include "net/socket.h"

namespace penstock::net {

// The events of one ZeroMQ socket. Destroyed before the socket that it watches. Confined to the thread that created it,
// which may differ from the socket's thread: libzmq locks their shared state.
class SocketMonitor {
 public:
  struct Event {
    uint16_t kind = 0;  // one of ZMQ_EVENT_*
    uint32_t value = 0;
  };
  // Watches a ZeroMQ socket that is neither bound nor connected yet, for events of `kinds`.
  static Result<std::unique_ptr<SocketMonitor>> watch(SocketContext& context, void* watched, int kinds);

  // For `watch`.
  SocketMonitor(void* events, void* watched) : events_(events), watched_(watched) {}
  SocketMonitor(const SocketMonitor&) = delete;
  SocketMonitor& operator=(const SocketMonitor&) = delete;
  ~SocketMonitor();

  // Returns the next event, or none if there is none yet.
  std::optional<Event> try_event();

  Waitable waitable() const { return Waitable(events_); }

 private:
  void* events_;
  void* watched_;
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
  static Result<std::unique_ptr<ConnectionMonitor>> watch(SocketContext& context, void* watched);

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
  static Result<std::unique_ptr<ListenerMonitor>> watch(SocketContext& context, void* watched);

  // For `watch`.
  explicit ListenerMonitor(std::unique_ptr<SocketMonitor> monitor) : monitor_(std::move(monitor)) {}

  // Returns the next event, or none if there is none yet.
  std::optional<ListenerEvent> try_event();

  Waitable waitable() const { return monitor_->waitable(); }

 private:
  std::unique_ptr<SocketMonitor> monitor_;
};

}  // namespace penstock::net
