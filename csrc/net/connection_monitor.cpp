// SPDX-License-Identifier: Apache-2.0
#include "net/connection_monitor.h"

#include <zmq.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/identity.h"

namespace penstock::net {
namespace {

constexpr int kWatchedEvents = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED |
                               ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                               ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;
constexpr size_t kEventBytes = 6;  // u16 event, u32 value; a second part names the endpoint

// Reads the whole of the next message; returns whether there was one, and it was an event.
bool try_receive_event(void* socket, std::array<std::byte, kEventBytes>& event) {
  bool is_event = false;
  bool is_more = true;
  for (int index = 0; is_more; ++index) {
    zmq_msg_t part;
    zmq_msg_init(&part);
    int received = 0;
    do {
      received = zmq_msg_recv(&part, socket, ZMQ_DONTWAIT);
    } while (received < 0 && zmq_errno() == EINTR);
    if (index == 0 && received == static_cast<int>(kEventBytes)) {
      std::memcpy(event.data(), zmq_msg_data(&part), kEventBytes);
      is_event = true;
    }
    is_more = received >= 0 && zmq_msg_more(&part) != 0;
    zmq_msg_close(&part);
  }
  return is_event;
}

// Why a server ended the connection while keys were exchanged, as far as the client can know.
std::string closed_reason(uint32_t error_number) {
  return std::string("the connection ended while keys were exchanged (") +
         std::strerror(static_cast<int>(error_number)) +
         "): the server has another key than the one expected of it, or is going down; both sides must have the keys "
         "of one folder made by penstock keys";
}

std::string protocol_reason(uint32_t detail) {
  if (detail == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH) {
    return "the server does not use CURVE; only servers of penstock can be connected to";
  }
  if (detail == ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC) {
    return "the server has another key than the one expected of it; both sides must have the keys of one folder made "
           "by penstock keys";
  }
  return "the server does not speak ZeroMQ's protocol, or not this version of it; only servers of penstock can be "
         "connected to";
}

std::string key_reason(uint32_t status) {
  return "the server does not let this key in (status " + std::to_string(status) +
         "): it has other keys, or its role may not connect there; both sides must have the keys of one folder made by "
         "penstock keys";
}

}  // namespace

Result<std::unique_ptr<ConnectionMonitor>> ConnectionMonitor::watch(SocketContext& context, void* watched) {
  const std::string endpoint = "inproc://" + make_endpoint_name();
  void* events = zmq_socket(context.handle(), ZMQ_PAIR);
  if (events == nullptr) {
    return Fault{Errc::kFailed, std::string("opening a monitor failed: ") + zmq_strerror(zmq_errno())};
  }
  auto monitor = std::make_unique<ConnectionMonitor>(events, watched);
  const int zero = 0;
  // libzmq's I/O thread blocks on a monitor whose queue is full, and with it every connection of the process. There are
  // few events (one for each attempt to connect), so the queue has no limit.
  if (zmq_setsockopt(events, ZMQ_RCVHWM, &zero, sizeof zero) != 0 ||
      zmq_setsockopt(events, ZMQ_LINGER, &zero, sizeof zero) != 0 ||
      zmq_socket_monitor(watched, endpoint.c_str(), kWatchedEvents) != 0 ||
      zmq_connect(events, endpoint.c_str()) != 0) {
    return Fault{Errc::kFailed, std::string("watching a connection failed: ") + zmq_strerror(zmq_errno())};
  }
  return monitor;
}

ConnectionMonitor::~ConnectionMonitor() {
  // A socket that is closed lives on in libzmq until its connection has ended, and would tell of that. With nobody left
  // to tell, libzmq's I/O thread would wait for ever, and with it every connection of the context.
  zmq_socket_monitor(watched_, nullptr, 0);
  zmq_close(events_);
}

std::optional<ConnectionEvent> ConnectionMonitor::try_event() {
  std::array<std::byte, kEventBytes> bytes{};
  while (try_receive_event(events_, bytes)) {
    uint16_t kind = 0;
    uint32_t value = 0;
    std::memcpy(&kind, bytes.data(), sizeof kind);
    std::memcpy(&value, bytes.data() + sizeof kind, sizeof value);
    if (auto event = read_event(kind, value)) return event;
  }
  return std::nullopt;
}

std::optional<ConnectionEvent> ConnectionMonitor::read_event(uint16_t kind, uint32_t value) {
  using Kind = ConnectionEvent::Kind;
  switch (kind) {
    case ZMQ_EVENT_HANDSHAKE_SUCCEEDED: is_connected_ = true; return ConnectionEvent{.kind = Kind::kConnected};
    case ZMQ_EVENT_DISCONNECTED:
      // Also says that a connection ended whose handshake had failed, which was told before.
      if (!is_connected_) return std::nullopt;
      is_connected_ = false;
      return ConnectionEvent{.kind = Kind::kDisconnected};
    case ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL:
      return ConnectionEvent{.kind = Kind::kRefused, .reason = closed_reason(value)};
    case ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL:
      // Also said of a message that was damaged on its way. The connection has ended then, which is not told again.
      if (std::exchange(is_connected_, false)) return ConnectionEvent{.kind = Kind::kDisconnected};
      return ConnectionEvent{.kind = Kind::kRefused, .reason = protocol_reason(value), .is_final = true};
    case ZMQ_EVENT_HANDSHAKE_FAILED_AUTH:
      return ConnectionEvent{.kind = Kind::kRefused, .reason = key_reason(value), .is_final = true};
    default: return std::nullopt;
  }
}

}  // namespace penstock::net
