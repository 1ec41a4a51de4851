// SPDX-License-Identifier: Apache-2.0
#include "net/client_socket.h"

#include <chrono>
#include <utility>

#include "base/live_clock.h"

namespace penstock::net {
namespace {

// libzmq connects again within a second after a connection ended, except when it received bytes of another protocol:
// then it never does. A damaged message must not cost more than its connection.
constexpr auto kGivenUpAfter = std::chrono::seconds(2);

}  // namespace

Result<std::unique_ptr<ClientSocket>> ClientSocket::connect(SocketContext& context, const Endpoint& endpoint,
                                                            const KeyPair& own, const PublicKey& server_key,
                                                            const ClientSocketOptions& options) {
  if (endpoint.port == 0 || endpoint.host == "*") {
    return Error{Errc::kMalformed, "connecting to " + endpoint.text() +
                                       " failed: it names no single server; name the host and port of one"};
  }
  auto socket = CurveSocket::open_client(
      context, {.own = own, .server_key = server_key, .handshake_interval = options.handshake_interval},
      options.limits);
  if (!socket) return socket.error();
  auto monitor = ConnectionMonitor::watch(context, socket.value()->handle());
  if (!monitor) return monitor.error();
  auto client = std::make_unique<ClientSocket>(std::move(monitor).value(), std::move(socket).value(), endpoint);
  if (auto begun = client->begin(); !begun) return begun.error();
  return client;
}

Result<void> ClientSocket::begin() { return socket_->connect(endpoint_.text(), is_ipv6_host(endpoint_.host)); }

std::optional<ConnectionEvent> ClientSocket::try_event() {
  auto event = monitor_->try_event();
  if (!event) {
    if (lost_at_ && clock_now() >= *due_at() && !reconnect()) lost_at_ = clock_now();
    return event;
  }
  socket_->settle();
  lost_at_.reset();
  if (event->kind == ConnectionEvent::Kind::kDisconnected) lost_at_ = clock_now();
  is_connected_ = event->kind == ConnectionEvent::Kind::kConnected;
  if (event->kind == ConnectionEvent::Kind::kRefused) {
    event->reason = "connecting to " + endpoint_.text() + " failed: " + event->reason;
  }
  return event;
}

std::optional<Instant> ClientSocket::due_at() const {
  if (!lost_at_) return std::nullopt;
  return *lost_at_ + kGivenUpAfter;
}

Result<void> ClientSocket::reconnect() {
  lost_at_.reset();
  socket_->disconnect(endpoint_.text());
  // Events of the former connection say nothing of the one that begins.
  while (try_event()) {
  }
  is_connected_ = false;
  return begin();
}

void ClientSocket::renew() {
  if (is_connected_ && !reconnect()) lost_at_ = clock_now();
}

Result<void> ClientSocket::send(std::span<const std::byte> only_part) {
  OutgoingPart part{.bytes = only_part, .release = nullptr};
  return send(std::span(&part, 1));
}

Result<bool> ClientSocket::try_receive(ClientReceipt& receipt) {
  auto received = socket_->try_receive(message_);
  if (!received) return received.error();
  if (received.value() == ReceiveOutcome::kNothing) return false;
  receipt.parts = std::move(message_.parts);
  receipt.offence = std::move(message_.offence);
  return true;
}

}  // namespace penstock::net
