// SPDX-License-Identifier: Apache-2.0
#pragma once
// The worker's end of a data connection by hand: it seals what a test says, and sends what the test makes of that.

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "net/authenticator.h"
#include "net/seal.h"
#include "net/tcp_socket.h"
#include "wire/pool_record.h"

namespace penstock::net {

// Confined to one thread. Its calls are those of a DataServer.
class HandDataServer {
 public:
  // Writes to the head of a piece before it is sealed.
  using Alteration = std::function<void(const wire::PieceHead&, std::span<std::byte>)>;

  HandDataServer(SocketContext& context, Authenticator& authenticator, uint64_t worker_id, Alteration alter_head = {})
      : worker_id_(worker_id),
        alter_head_(std::move(alter_head)),
        domain_(authenticator.make_domain({})),
        socket_(TcpSocket::open_ticket_server(
                    context, {.zap_domain = domain_->name(), .handshake_interval = std::chrono::seconds(30)}, {})
                    .value()),
        endpoint_(socket_->listen({.host = "127.0.0.1", .port = 0}, KeyOrigin::kGiven).value()) {}

  const Endpoint& endpoint() const { return endpoint_; }
  Waitable waitable() const { return socket_->waitable(); }

  Result<wire::SealGrant> begin(uint64_t trainer_id, uint32_t link, const wire::SealOffer& offer) {
    const wire::SealGrant grant{
        .cipher = wire::SealCipher::kAes256Gcm, .nonce = draw_seal_nonce().value(), .data_endpoint = endpoint_.text()};
    const auto terms = agree(grant.cipher, offer.nonce, grant.nonce,
                             {.trainer_id = trainer_id, .worker_id = worker_id_, .link = link});
    if (!terms) return terms.error();
    sealer_.emplace(Sealer::make(grant.cipher, terms.value().to_trainer).value());
    link_ = link;
    counter_ = 0;
    routing_id_.clear();
    domain_->expect(terms.value().ticket);
    return grant;
  }

  // Takes what has come: the trainer joins.
  Result<void> receive() {
    ReceivedMessage message;
    for (;;) {
      const auto received = socket_->try_receive(message);
      if (!received) return received.error();
      if (received.value() == ReceiveOutcome::kNothing) return {};
      if (received.value() != ReceiveOutcome::kMessage || message.parts.size() != 1) continue;
      const auto join = wire::parse_piece(message.parts.front().bytes());
      if (join && join.value().head.link == link_) routing_id_ = message.routing_id;
    }
  }
  bool has_room() const { return !routing_id_.empty(); }

  Result<void> send(wire::PieceHead head, std::span<const std::byte> piece) {
    head.sender = worker_id_;
    head.link = link_;
    head.counter = ++counter_;
    auto head_bytes = wire::write_piece_head(head);
    if (alter_head_) alter_head_(head, head_bytes);
    return send_bytes(seal(head_bytes, head.counter, piece));
  }

  // A message of this head and piece, under the seal of this number.
  std::vector<std::byte> seal(std::span<const std::byte> head, uint64_t counter, std::span<const std::byte> piece) {
    std::vector<std::byte> message(head.begin(), head.end());
    message.resize(head.size() + piece.size() + wire::kSealTagBytes);
    EXPECT_TRUE(sealer_->seal(counter, head, piece, std::span(message).subspan(head.size())));
    return message;
  }
  Result<void> send_bytes(std::span<const std::byte> message) {
    OutgoingPart part{.bytes = message, .release = nullptr};
    return socket_->send(routing_id_, {&part, 1});
  }

 private:
  const uint64_t worker_id_;
  const Alteration alter_head_;
  std::unique_ptr<Authenticator::Domain> domain_;
  std::unique_ptr<TcpSocket> socket_;
  const Endpoint endpoint_;
  std::optional<Sealer> sealer_;
  uint32_t link_ = 0;
  uint64_t counter_ = 0;
  std::string routing_id_;  // of the trainer's connection; empty until it joins
};

}  // namespace penstock::net
