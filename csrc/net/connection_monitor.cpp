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

constexpr int kClientEvents = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED |
                              ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL | ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL |
                              ZMQ_EVENT_HANDSHAKE_FAILED_AUTH;
constexpr int kListenerEvents =
    ZMQ_EVENT_LISTENING | ZMQ_EVENT_ACCEPTED | ZMQ_EVENT_ACCEPT_FAILED | ZMQ_EVENT_DISCONNECTED;
constexpr size_t kEventBytes = 6;  // u16 event, u32 value; a second part names the endpoint

// Reads all parts of the next message; returns whether there was one and it was an event.
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

// Why a server ended the connection during the key exchange, as far as the client can know.
std::string closed_reason(uint32_t error_number) {
  return std::string("the connection closed during the key exchange (") +
         std::strerror(static_cast<int>(error_number)) +
         "): the server has a different key than expected, is shutting down, or closed the connection because too many "
         "clients without a key connect; both sides must have keys from the same folder, created by penstock keys";
}

std::string protocol_reason(uint32_t detail) {
  if (detail == ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH) {
    return "the server does not use CURVE; connect only to penstock servers";
  }
  if (detail == ZMQ_PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC) {
    return "the server has a different key than expected; both sides must have keys from the same folder, created by "
           "penstock keys";
  }
  return "the server does not use ZeroMQ's protocol, or not this version of it; connect only to penstock servers";
}

std::string key_reason(uint32_t status) {
  return "the server does not accept this key (status " + std::to_string(status) +
         "): it has other keys, or its role may not connect there; both sides must have keys from the same folder, "
         "created by penstock keys";
}

}  // namespace

Result<std::unique_ptr<SocketMonitor>> SocketMonitor::watch(SocketContext& context, void* watched, int kinds) {
  const std::string endpoint = "inproc://" + make_endpoint_name();
  void* events = zmq_socket(context.handle(), ZMQ_PAIR);
  if (events == nullptr) {
    return Fault{Errc::kFailed, std::string("opening a monitor failed: ") + zmq_strerror(zmq_errno())};
  }
  auto monitor = std::make_unique<SocketMonitor>(events, watched);
  const int zero = 0;
  // If a monitor's queue is full, libzmq's I/O thread blocks, and with it every connection of the process. The queue is
  // therefore unlimited. A client has one event for each attempt to connect; a server's events are read by a dedicated
  // thread, and libzmq takes far longer to generate an event than that thread takes to read it.
  if (zmq_setsockopt(events, ZMQ_RCVHWM, &zero, sizeof zero) != 0 ||
      zmq_setsockopt(events, ZMQ_LINGER, &zero, sizeof zero) != 0 ||
      zmq_socket_monitor(watched, endpoint.c_str(), kinds) != 0 || zmq_connect(events, endpoint.c_str()) != 0) {
    return Fault{Errc::kFailed, std::string("watching a connection failed: ") + zmq_strerror(zmq_errno())};
  }
  return monitor;
}

SocketMonitor::~SocketMonitor() {
  // A closed socket lives on in libzmq until its connection has ended, and would then report that. Without a reader,
  // libzmq's I/O thread would wait forever, and with it every connection of the context.
  zmq_socket_monitor(watched_, nullptr, 0);
  zmq_close(events_);
}

std::optional<SocketMonitor::Event> SocketMonitor::try_event() {
  std::array<std::byte, kEventBytes> bytes{};
  if (!try_receive_event(events_, bytes)) return std::nullopt;
  Event event;
  std::memcpy(&event.kind, bytes.data(), sizeof event.kind);
  std::memcpy(&event.value, bytes.data() + sizeof event.kind, sizeof event.value);
  return event;
}

Result<std::unique_ptr<ConnectionMonitor>> ConnectionMonitor::watch(SocketContext& context, void* watched) {
  auto monitor = SocketMonitor::watch(context, watched, kClientEvents);
  if (!monitor) return monitor.error();
  return std::make_unique<ConnectionMonitor>(std::move(monitor).value());
}

std::optional<ConnectionEvent> ConnectionMonitor::try_event() {
  while (const auto told = monitor_->try_event()) {
    if (auto event = read_event(*told)) return event;
  }
  return std::nullopt;
}

std::optional<ConnectionEvent> ConnectionMonitor::read_event(const SocketMonitor::Event& event) {
  using Kind = ConnectionEvent::Kind;
  switch (event.kind) {
    case ZMQ_EVENT_HANDSHAKE_SUCCEEDED: is_connected_ = true; return ConnectionEvent{.kind = Kind::kConnected};
    case ZMQ_EVENT_DISCONNECTED:
      // Also reported when a connection ends whose handshake had failed, which was reported before.
      if (!is_connected_) return std::nullopt;
      is_connected_ = false;
      return ConnectionEvent{.kind = Kind::kDisconnected};
    case ZMQ_EVENT_HANDSHAKE_FAILED_NO_DETAIL:
      return ConnectionEvent{.kind = Kind::kRefused, .reason = closed_reason(event.value)};
    case ZMQ_EVENT_HANDSHAKE_FAILED_PROTOCOL:
      // Also reported for a message that was damaged in transit. The connection has then ended, which is not reported
      // again.
      if (std::exchange(is_connected_, false)) return ConnectionEvent{.kind = Kind::kDisconnected};
      return ConnectionEvent{.kind = Kind::kRefused, .reason = protocol_reason(event.value), .is_final = true};
    case ZMQ_EVENT_HANDSHAKE_FAILED_AUTH:
      return ConnectionEvent{.kind = Kind::kRefused, .reason = key_reason(event.value), .is_final = true};
    default: return std::nullopt;
  }
}

Result<std::unique_ptr<ListenerMonitor>> ListenerMonitor::watch(SocketContext& context, void* watched) {
  auto monitor = SocketMonitor::watch(context, watched, kListenerEvents);
  if (!monitor) return monitor.error();
  return std::make_unique<ListenerMonitor>(std::move(monitor).value());
}

std::optional<ListenerEvent> ListenerMonitor::try_event() {
  using Kind = ListenerEvent::Kind;
  const auto event = monitor_->try_event();
  if (!event) return std::nullopt;
  const int value = static_cast<int>(event->value);
  switch (event->kind) {
    case ZMQ_EVENT_LISTENING: return ListenerEvent{.kind = Kind::kListening, .value = value};
    case ZMQ_EVENT_ACCEPTED: return ListenerEvent{.kind = Kind::kAccepted, .value = value};
    case ZMQ_EVENT_ACCEPT_FAILED: return ListenerEvent{.kind = Kind::kRefused, .value = value};
    default: return ListenerEvent{.kind = Kind::kEnded, .value = value};  // ZMQ_EVENT_DISCONNECTED
  }
}

}  // namespace penstock::net
