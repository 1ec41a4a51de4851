// SPDX-License-Identifier: Apache-2.0
#pragma once
// The events of a client's connection, from libzmq's socket monitor. Without it a client with a wrong key would try
// again for ever and say nothing.

#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "net/readiness.h"
#include "net/socket.h"

namespace penstock::net {

struct ConnectionEvent {
  enum class Kind : uint8_t {
    kConnected,     // the handshake is over: the server has the key that was expected, and lets this client in
    kDisconnected,  // after it was connected
    kRefused,       // during the handshake; `reason` says why
  };
  Kind kind = Kind::kConnected;
  std::string reason = {};
  // libzmq does not try again by itself.
  bool is_final = false;
};

// Destroyed before the socket that it watches. Confined to the thread that made it.
class ConnectionMonitor {
 public:
  // Watches a ZeroMQ socket that is not connected yet.
  static Result<std::unique_ptr<ConnectionMonitor>> watch(SocketContext& context, void* watched);

  // For `watch`.
  ConnectionMonitor(void* events, void* watched) : events_(events), watched_(watched) {}
  ConnectionMonitor(const ConnectionMonitor&) = delete;
  ConnectionMonitor& operator=(const ConnectionMonitor&) = delete;
  ~ConnectionMonitor();

  // The next event, none if there is none yet.
  std::optional<ConnectionEvent> try_event();

  Waitable waitable() const { return Waitable(events_); }

 private:
  std::optional<ConnectionEvent> read_event(uint16_t kind, uint32_t value);

  void* events_;
  void* watched_;
  bool is_connected_ = false;
};

}  // namespace penstock::net
