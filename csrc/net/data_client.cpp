// SPDX-License-Identifier: Apache-2.0
#include "net/data_client.h"

#include <algorithm>
#include <array>
#include <string>

namespace penstock::net {
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
