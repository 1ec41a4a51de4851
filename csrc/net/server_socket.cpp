// SPDX-License-Identifier: Apache-2.0
#include "net/server_socket.h"

#include <cstring>
#include <optional>
#include <utility>

#include "net/key_folder.h"

namespace penstock::net {
namespace {

AllowedKeys allowed_keys(const PublicKeys& keys, std::span<const Role> roles) {
  AllowedKeys allowed;
  for (const Role role : roles) {
    for (const PublicKey& key : keys.generations(role)) allowed.emplace(key, role);
    for (const auto& [key, name] : keys.named(role)) allowed.emplace(key, role);
  }
  return allowed;
}

KeyNames all_names(const PublicKeys& keys) {
  KeyNames names = keys.users;
  names.insert(keys.machines.begin(), keys.machines.end());
  return names;
}

// Checks the folder of the keys, if they were read from one.
Authenticator::Look look_at(const KeyRing& keys, const std::vector<Role>& roles) {
  if (keys.folder().empty()) return {};
  // Shared by the copies of the function.
  auto watch = std::make_shared<KeyFolderWatch>(keys.folder(), keys.own_role(), keys.public_keys());
  return [watch, roles]() -> Result<std::optional<Authenticator::Change>> {
    auto change = watch->look();
    if (!change) return change.error();
    if (!change.value()) return std::optional<Authenticator::Change>();
    const PublicKeys& changed = change.value()->keys;
    return std::optional(Authenticator::Change{.keys = allowed_keys(changed, roles),
                                               .names = all_names(changed),
                                               .notice = std::move(change.value()->notice)});
  };
}

}  // namespace

Result<std::unique_ptr<ServerSocket>> ServerSocket::bind(SocketContext& context, Authenticator& authenticator,
                                                         const Endpoint& endpoint, const KeyRing& keys,
                                                         const ServerSocketOptions& options) {
  auto domain = authenticator.make_domain(allowed_keys(keys.public_keys(), options.allowed_roles),
                                          all_names(keys.public_keys()), look_at(keys, options.allowed_roles));
  auto socket = TcpSocket::open_server(
      context, {.own = keys.own(), .zap_domain = domain->name(), .handshake_interval = options.handshake_interval},
      options.limits);
  if (!socket) return socket.error();
  auto bound =
      socket.value()->listen(endpoint, keys.origin(), {.sharer_count = options.sharer_count, .holders = options.room});
  if (!bound) return bound.error();
  return std::make_unique<ServerSocket>(std::move(domain), std::move(socket).value(), std::move(bound).value());
}

Result<void> ServerSocket::send(std::string_view routing_id, std::span<const std::byte> only_part) {
  OutgoingPart part{.bytes = only_part, .release = nullptr};
  return send(routing_id, std::span(&part, 1));
}

Result<bool> ServerSocket::try_receive(ServerReceipt& receipt) {
  for (;;) {
    auto received = socket_->try_receive(message_);
    if (!received) return received.error();
    if (received.value() == ReceiveOutcome::kNothing) {
      if (auto health = domain_->authenticator().health(); !health) return health.error();
      return false;
    }
    auto identity = PeerIdentity::parse(message_.user_id);
    // No client passes the handshake without an identity, so a message without one has no valid sender and is ignored.
    if (!identity) continue;
    auto holder = domain_->holder_of(*identity);
    if (!holder) {  // the key was admitted when it connected
      message_.parts.clear();
      message_.offence = "its key is no longer accepted";
    }
    receipt.peer = {.routing_id = std::move(message_.routing_id), .identity = *identity};
    receipt.peer.address = std::move(message_.address);
    if (holder) (identity->role == Role::kWorker ? receipt.peer.machine : receipt.peer.user) = *std::move(holder);
    receipt.parts = std::move(message_.parts);
    receipt.offence = std::move(message_.offence);
    return true;
  }
}

namespace {

constexpr int kReceiveCountMax = 64;  // per turn; a trainer sends a single message

// A trainer sends one small message, but the holder of its ticket can make this process keep four large ones.
constexpr wire::MessageLimits kServerLimits{.part_bytes_max = wire::kPieceMessageBytesMax,
                                            .message_bytes_max = wire::kPieceMessageBytesMax,
                                            .received_messages_max = 4};
// Each link is admitted once, and one link is current.
constexpr HolderRoom kServerRoom{.count_max = 64, .descriptors_for_each = 16};

}  // namespace

Result<std::unique_ptr<DataServer>> DataServer::bind(SocketContext& context, Authenticator& authenticator,
                                                     const Endpoint& endpoint, const Options& options,
                                                     std::function<void()> on_room) {
  auto domain = authenticator.make_domain({});
  auto socket = TcpSocket::open_ticket_server(
      context, {.zap_domain = domain->name(), .handshake_interval = kHandshakeInterval}, kServerLimits);
  if (!socket) return socket.error();
  auto bound =
      socket.value()->listen(endpoint, options.origin, {.sharer_count = options.sharer_count, .holders = kServerRoom});
  if (!bound) return bound.error();
  return std::make_unique<DataServer>(std::move(domain), std::move(socket).value(), std::move(bound).value(), options,
                                      std::move(on_room));
}

Result<wire::SealGrant> DataServer::begin(uint64_t trainer_id, uint32_t link, const wire::SealOffer& offer) {
  end();
  const auto nonce = draw_seal_nonce();
  if (!nonce) return nonce.error();
  const auto cipher = choose_cipher(options_.ciphers, offer.ciphers);
  const auto terms = agree(cipher, offer.nonce, nonce.value(),
                           {.trainer_id = trainer_id, .worker_id = options_.worker_id, .link = link});
  if (!terms) return terms.error();
  auto sealer = Sealer::make(cipher, terms.value().to_trainer);
  if (!sealer) return sealer.error();
  auto opener = Opener::make(cipher, terms.value().to_worker);
  if (!opener) return opener.error();
  session_.emplace(Session{.trainer_id = trainer_id,
                           .link = link,
                           .sealer = std::move(sealer).value(),
                           .opener = std::move(opener).value()});
  domain_->expect(terms.value().ticket);
  return wire::SealGrant{.cipher = cipher, .nonce = nonce.value()};
}

void DataServer::end() {
  domain_->expect(std::nullopt);
  session_.reset();
  routing_id_.clear();
}

Result<void> DataServer::receive() {
  for (int count = 0; count < kReceiveCountMax; ++count) {
    const auto received = socket_->try_receive(message_);
    if (!received) return received.error();
    if (received.value() == ReceiveOutcome::kNothing) return {};
    if (received.value() == ReceiveOutcome::kMessage && routing_id_.empty() && joins(message_))
      routing_id_ = message_.routing_id;
  }
  return {};
}

bool DataServer::joins(const ReceivedMessage& message) {
  if (!session_ || message.parts.size() != 1) return false;
  const auto piece = wire::parse_piece(message.parts.front().bytes());
  if (!piece) return false;
  const wire::PieceHead& head = piece.value().head;
  return head.kind == wire::PieceHead::Kind::kJoin && head.sender == session_->trainer_id &&
         head.link == session_->link && head.counter == 1 &&
         session_->opener.open(1, piece.value().head_bytes, piece.value().sealed, {});
}

Result<void> DataServer::send(wire::PieceHead head, std::span<const std::byte> piece) {
  PENSTOCK_ASSERT(has_room() && session_ && piece.size() <= wire::kPieceBytesMax);
  if (session_->counter == kSealedCountMax)
    return Fault{Errc::kClosed, "the key of this connection has reached its limit of encrypted chunks"};
  head.kind = wire::PieceHead::Kind::kPiece;
  head.sender = options_.worker_id;
  head.link = session_->link;
  head.counter = ++session_->counter;
  const auto head_bytes = wire::write_piece_head(head);
  auto buffer = buffers_->take();
  const size_t size = wire::kPieceHeadBytes + piece.size() + wire::kSealTagBytes;
  const std::span<std::byte> message(buffer.get(), size);
  std::memcpy(message.data(), head_bytes.data(), head_bytes.size());
  auto sealed = session_->sealer.seal(head.counter, head_bytes, piece, message.subspan(wire::kPieceHeadBytes));
  // A copyable function owns it until ZeroMQ has sent or dropped it.
  auto held = std::make_shared<SealedBuffers::Buffer>(std::move(buffer));
  OutgoingPart part{.bytes = message, .release = [buffers = buffers_, held] { buffers->give_back(std::move(*held)); }};
  if (!sealed) {
    part.release();
    return sealed;
  }
  return socket_->send(routing_id_, {&part, 1});
}

}  // namespace penstock::net
