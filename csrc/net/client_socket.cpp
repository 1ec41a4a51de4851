// SPDX-License-Identifier: Apache-2.0
#include "net/client_socket.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <string>
#include <utility>

#include "base/clock.h"

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
  auto monitor = ConnectionMonitor::watch(context, socket.value()->zmq());
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

namespace {

// Pieces that wait to be opened. With more of them, the heap that libzmq receives into is returned to the system
// between batches: with 8, a batch of 38 MB had 2,700 page faults.
constexpr int kReceivedCountMax = 2;

constexpr wire::MessageLimits kClientLimits{.part_bytes_max = wire::kPieceMessageBytesMax,
                                            .message_bytes_max = wire::kPieceMessageBytesMax,
                                            .received_messages_max = kReceivedCountMax};

}  // namespace

Result<std::unique_ptr<DataClient>> DataClient::connect(SocketContext& context, Resolver& resolver,
                                                        const LinkName& name, const wire::SealOffer& offer,
                                                        const wire::SealGrant& grant) {
  const auto endpoint = Endpoint::parse(grant.data_endpoint);
  if (!endpoint) return endpoint.error();
  const auto terms = agree(grant.cipher, offer.nonce, grant.nonce, name);
  if (!terms) return terms.error();
  auto sealer = Sealer::make(grant.cipher, terms.value().to_worker);
  if (!sealer) return sealer.error();
  auto opener = Opener::make(grant.cipher, terms.value().to_trainer);
  if (!opener) return opener.error();
  auto socket =
      ClientSocket::connect(context, resolver, endpoint.value(), terms.value().ticket, {.limits = kClientLimits});
  if (!socket) return socket.error();
  return std::make_unique<DataClient>(std::move(socket).value(), std::move(sealer).value(), std::move(opener).value(),
                                      name);
}

DataClient::Outcome DataClient::fail(std::string fault) {
  fault_ = std::move(fault);
  return Outcome::kFault;
}

DataClient::Outcome DataClient::try_receive() {
  const auto received = socket_->try_receive(receipt_);
  if (!received) return fail(received.error().message);
  if (!received.value()) return Outcome::kNothing;
  if (!receipt_.offence.empty()) return fail(receipt_.offence);
  if (receipt_.parts.size() != 1) return fail("it has " + std::to_string(receipt_.parts.size()) + " parts");
  const auto parsed = wire::parse_piece(receipt_.parts.front().bytes());
  if (!parsed) return fail(parsed.error().message);
  piece_ = parsed.value();
  const wire::PieceHead& head = piece_.head;
  if (head.kind != wire::PieceHead::Kind::kPiece || head.sender != name_.worker_id || head.link != name_.link)
    return fail("it belongs to another connection");
  if (head.counter != counter_ + 1) {
    return fail("it is number " + std::to_string(head.counter) + " of its connection, but number " +
                std::to_string(counter_ + 1) + " was expected: messages were lost, repeated or reordered");
  }
  ++counter_;
  return Outcome::kPiece;
}

bool DataClient::open(std::span<std::byte> room) {
  if (opener_.open(piece_.head.counter, piece_.head_bytes, piece_.sealed, room)) return true;
  fault_ = "its authentication tag is wrong: it was changed in transit, or has another sender";
  return false;
}

std::optional<ConnectionEvent> DataClient::try_event() {
  auto event = socket_->try_event();
  if (event && event->kind == ConnectionEvent::Kind::kConnected) join();
  return event;
}

void DataClient::join() {
  if (std::exchange(has_joined_, true)) return;  // its only message was for the connection before
  const auto head = wire::write_piece_head(
      {.kind = wire::PieceHead::Kind::kJoin, .sender = name_.trainer_id, .link = name_.link, .counter = 1});
  std::array<std::byte, wire::kPieceHeadBytes + wire::kSealTagBytes> message{};
  std::copy(head.begin(), head.end(), message.begin());
  if (sealer_.seal(1, head, {}, std::span(message).subspan(wire::kPieceHeadBytes)))
    static_cast<void>(socket_->send(message));
}

}  // namespace penstock::net
