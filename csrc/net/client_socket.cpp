// SPDX-License-Identifier: Apache-2.0
#include "net/client_socket.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/live_clock.h"

namespace penstock::net {
namespace {

// libzmq reconnects within a second after a connection ended, except when it received bytes of another protocol: then
// it never does. A damaged message must not cost more than its connection.
constexpr auto kGivenUpAfter = std::chrono::seconds(2);

// The pause between two rounds in which a server refused all of its possible keys; doubled after each.
constexpr std::chrono::milliseconds kRoundPause{50};
constexpr std::chrono::milliseconds kRoundPauseMax{1000};

}  // namespace

Result<std::unique_ptr<ClientSocket>> ClientSocket::connect(SocketContext& context, Resolver& resolver,
                                                            const Endpoint& endpoint, const KeyPair& own,
                                                            const PublicKey& server_key,
                                                            const ClientSocketOptions& options) {
  const TcpSocket::ClientSetup setup{
      .own = own, .server_key = server_key, .handshake_interval = options.handshake_interval};
  return begin_with(context, resolver, endpoint, TcpSocket::open_client(context, setup, options.limits));
}

Result<std::unique_ptr<ClientSocket>> ClientSocket::connect(SocketContext& context, Resolver& resolver,
                                                            const Endpoint& endpoint, const KeyRing& keys,
                                                            Role server_role, const ClientSocketOptions& options) {
  auto client = connect(context, resolver, endpoint, keys.own(), keys.public_key(server_role), options);
  if (!client) return client;
  ServerKeys& server = client.value()->server_keys_.emplace(
      ServerKeys{.role = server_role, .keys = keys.public_keys().generations(server_role), .pause = kRoundPause});
  if (!keys.folder().empty()) server.reader.emplace(keys.folder());
  return client;
}

Result<std::unique_ptr<ClientSocket>> ClientSocket::connect(SocketContext& context, Resolver& resolver,
                                                            const Endpoint& endpoint, const Ticket& ticket,
                                                            const ClientSocketOptions& options) {
  const TcpSocket::TicketClientSetup setup{.ticket = ticket, .handshake_interval = options.handshake_interval};
  return begin_with(context, resolver, endpoint, TcpSocket::open_ticket_client(context, setup, options.limits));
}

Result<std::unique_ptr<ClientSocket>> ClientSocket::begin_with(SocketContext& context, Resolver& resolver,
                                                               const Endpoint& endpoint,
                                                               Result<std::unique_ptr<TcpSocket>> socket) {
  if (!socket) return socket.error();
  if (endpoint.port == 0 || endpoint.host == "*") {
    return Fault{Errc::kMalformed, "connecting to " + endpoint.text() +
                                       " failed: the address must name one server; pass its host and port"};
  }
  auto monitor = ConnectionMonitor::watch(context, socket.value()->handle());
  if (!monitor) return monitor.error();
  auto client =
      std::make_unique<ClientSocket>(std::move(monitor).value(), std::move(socket).value(), resolver, endpoint);
  if (auto begun = client->begin(); !begun) return begun.error();
  return client;
}

// Connects if the host's address is known. Otherwise try_event() continues after the lookup, or repeats it.
Result<void> ClientSocket::begin() {
  begin_at_.reset();
  looked_up_at_ = clock_now();
  const auto found = resolver_.try_resolve(endpoint_.host, looked_up_at_);
  awaits_address_ = !found;
  if (!found) return {};
  lookup_failure_ = *found ? "" : found->error().message;
  if (!*found) {
    lost_at_ = looked_up_at_;
    return {};
  }
  address_ = zmq_address(found->value(), endpoint_.port);
  auto begun = socket_->connect(address_, found->value().is_ipv6);
  if (!begun) address_.clear();
  return begun;
}

bool ClientSocket::has_moved() {
  if (!is_name_ || is_connected_ || address_.empty()) return false;
  const Instant now = clock_now();
  looked_up_at_ = now;  // also during the lookup: take_done() reports its end, so no time is due until then
  const auto found = resolver_.try_resolve(endpoint_.host, now);
  return found && *found && zmq_address(found->value(), endpoint_.port) != address_;
}

bool ClientSocket::try_other_key() {
  if (!server_keys_) return false;
  ServerKeys& server = *server_keys_;
  const Instant now = clock_now();
  const auto read = server.reader ? server.reader->take() : std::nullopt;
  if (server.reader) server.reader->ask(now);
  auto newest = read ? read->generations(server.role) : server.keys;
  const bool are_others = newest != server.keys;
  if (are_others) {
    server.keys = std::move(newest);
    server.place = 0;
    server.refused_count = 0;
    server.pause = kRoundPause;
  } else if (server.keys.size() == 1) {
    return false;  // libzmq retries with it
  } else {
    server.place = (server.place + 1) % server.keys.size();
    ++server.refused_count;
  }
  const bool is_round_over = server.refused_count == server.keys.size();
  socket_->disconnect(std::exchange(address_, {}));
  if (is_round_over) {
    server.refused_count = 0;
    begin_at_ = now + std::exchange(server.pause, std::min(2 * server.pause, kRoundPauseMax));
  }
  const auto expected = socket_->expect_server(server.keys[server.place]);
  if (!is_round_over && (!expected || !begin())) lost_at_ = now;
  return !is_round_over;
}

std::optional<ConnectionEvent> ClientSocket::try_event() {
  const bool is_to_begin = awaits_address_ || (begin_at_ && clock_now() >= *begin_at_);
  if (is_to_begin && !begin()) lost_at_ = clock_now();
  for (;;) {
    auto event = monitor_->try_event();
    if (!event) {
      const bool is_given_up = lost_at_ && clock_now() >= *lost_at_ + kGivenUpAfter;
      if ((is_given_up || has_moved()) && !reconnect()) lost_at_ = clock_now();
      return event;
    }
    socket_->settle();
    if (begin_at_) continue;  // from a connection that was dropped
    lost_at_.reset();
    if (event->kind == ConnectionEvent::Kind::kDisconnected) lost_at_ = clock_now();
    is_connected_ = event->kind == ConnectionEvent::Kind::kConnected;
    if (is_connected_ && server_keys_) {
      server_keys_->refused_count = 0;
      server_keys_->pause = kRoundPause;
    }
    if (event->kind == ConnectionEvent::Kind::kRefused) {
      if (!event->is_final && try_other_key()) continue;
      event->reason = "connecting to " + endpoint_.text() + " failed: " + event->reason;
    }
    return event;
  }
}

std::optional<Instant> ClientSocket::due_at() const {
  std::optional<Instant> due = begin_at_;
  if (lost_at_) due = earlier(due, *lost_at_ + kGivenUpAfter);
  if (is_name_ && !is_connected_ && !awaits_address_ && !begin_at_) due = earlier(due, looked_up_at_ + kAddressKept);
  return due;
}

Result<void> ClientSocket::reconnect() {
  lost_at_.reset();
  awaits_address_ = false;
  if (!address_.empty()) socket_->disconnect(std::exchange(address_, {}));
  // Discards events of the former connection, which do not describe the new one.
  while (monitor_->try_event()) socket_->settle();
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
