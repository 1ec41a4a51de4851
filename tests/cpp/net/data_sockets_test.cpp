// SPDX-License-Identifier: Apache-2.0
// The data connection of a link on loopback: a worker's end, a trainer's, strangers, and wires that change what
// crosses.
#include <gtest/gtest.h>
#include <zmq.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hand_data_server.h"
#include "net/client_socket.h"
#include "net/server_socket.h"
#include "pool_sockets.h"

namespace penstock::net {
namespace {

using Bytes = std::vector<std::byte>;
using Outcome = DataClient::Outcome;

constexpr LinkName kLink{.trainer_id = 7, .worker_id = 5, .link = 3};

class DataSocketsTest : public PoolSocketsTest {
 protected:
  std::unique_ptr<DataServer> serve_data(uint8_t ciphers = fast_ciphers()) {
    auto server = DataServer::bind(context_, *authenticator_, {.host = "127.0.0.1", .port = 0},
                                   {.worker_id = kLink.worker_id, .ciphers = ciphers}, [] {});
    EXPECT_TRUE(server) << server.error().message;
    return std::move(server).value();
  }

  // A trainer of the link that the server begins now.
  std::unique_ptr<DataClient> trainer(DataServer& server, LinkName name = kLink, uint8_t ciphers = fast_ciphers()) {
    const wire::SealOffer offer{.ciphers = ciphers, .nonce = draw_seal_nonce().value()};
    grant_ = server.begin(name.trainer_id, name.link, offer).value();
    grant_.data_endpoint = server.endpoint().text();
    auto client = DataClient::connect(context_, *resolver_, name, offer, grant_);
    EXPECT_TRUE(client) << client.error().message;
    return std::move(client).value();
  }

  bool has_joined(DataServer& server, DataClient& client, std::chrono::milliseconds patience = kPatience) {
    const auto deadline = Clock::now() + patience;
    while (!server.has_room() && Clock::now() < deadline) {
      static_cast<void>(client.try_event());
      EXPECT_TRUE(server.receive());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return server.has_room();
  }

  static Outcome next(DataClient& client) {
    const auto deadline = Clock::now() + kPatience;
    for (;;) {
      static_cast<void>(client.try_event());
      const Outcome outcome = client.try_receive();
      if (outcome != Outcome::kNothing || Clock::now() > deadline) return outcome;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void send(DataServer& server, uint64_t sequence, const Bytes& bytes) {
    ASSERT_TRUE(server.send({.key = {.epoch = 1, .sequence = sequence}, .payload_bytes = bytes.size()}, bytes));
  }

  wire::SealGrant grant_;
};

TEST_F(DataSocketsTest, PiecesComeAsTheyWereSent) {
  for (const uint8_t ciphers : {wire::kSealCiphers, wire::cipher_bit(wire::SealCipher::kChaCha20Poly1305)}) {
    const auto server = serve_data(ciphers);
    const auto client = trainer(*server, kLink, wire::kSealCiphers);
    ASSERT_TRUE(has_joined(*server, *client));
    for (uint64_t sequence = 0; sequence < 50; ++sequence) {
      const Bytes bytes(1 + 20'000 * sequence, static_cast<std::byte>(sequence));
      const auto deadline = Clock::now() + kPatience;
      while (!server->has_room() && Clock::now() < deadline) std::this_thread::yield();
      send(*server, sequence, bytes);
      ASSERT_EQ(next(*client), Outcome::kPiece) << client->fault();
      EXPECT_EQ(client->piece().head.key.sequence, sequence);
      Bytes opened(client->piece().size());
      ASSERT_TRUE(client->open(opened)) << client->fault();
      ASSERT_TRUE(opened == bytes);
    }
  }
}

TEST_F(DataSocketsTest, FewPiecesAreOnTheirWayAtOnce) {
  const auto server = serve_data();
  const auto client = trainer(*server);
  ASSERT_TRUE(has_joined(*server, *client));
  const Bytes bytes(wire::kPieceBytesMax);
  size_t sent_count = 0;
  const auto deadline = Clock::now() + std::chrono::milliseconds(500);  // the trainer reads nothing meanwhile
  while (Clock::now() < deadline) {
    if (!server->has_room()) continue;
    send(*server, 0, bytes);
    ASSERT_LT(++sent_count, 200u) << "nothing holds the worker back";
  }
  for (size_t count = 0; count < sent_count; ++count) {
    ASSERT_EQ(next(*client), Outcome::kPiece) << client->fault();
    Bytes opened(client->piece().size());
    ASSERT_TRUE(client->open(opened));
  }
}

TEST_F(DataSocketsTest, TicketLetsInOnceAndOnlyWhoHasTheKeyIsSentAnything) {
  const auto server = serve_data();
  const wire::SealOffer offer{.ciphers = fast_ciphers(), .nonce = draw_seal_nonce().value()};
  auto grant = server->begin(kLink.trainer_id, kLink.link, offer).value();
  grant.data_endpoint = server->endpoint().text();
  const auto terms = agree(grant.cipher, offer.nonce, grant.nonce, kLink).value();
  // A thief of the ticket, which crosses in the clear, has not the key.
  const auto thief = ClientSocket::connect(context_, *resolver_, server->endpoint(), terms.ticket).value();
  expect_connected(*thief);
  for (const Bytes& bytes : {Bytes(80), Bytes(1)}) ASSERT_TRUE(thief->send(bytes));
  const auto deadline = Clock::now() + std::chrono::milliseconds(200);
  while (Clock::now() < deadline) ASSERT_TRUE(server->receive());
  EXPECT_FALSE(server->has_room());
  // The trainer comes too late, and is told by the handshake; its next link has another ticket.
  const auto late = DataClient::connect(context_, *resolver_, kLink, offer, grant).value();
  std::optional<ConnectionEvent> event;
  while (!event && Clock::now() < deadline + kPatience) event = late->try_event();
  ASSERT_TRUE(event);
  EXPECT_EQ(event->kind, ConnectionEvent::Kind::kRefused);
  const auto next_link = trainer(*server, {.trainer_id = 7, .worker_id = 5, .link = 4});
  EXPECT_TRUE(has_joined(*server, *next_link));
}

TEST_F(DataSocketsTest, StrangersAreTurnedAwayInTheHandshake) {
  const auto server = serve_data();
  const auto client = trainer(*server);
  for (const Ticket& ticket : {Ticket("0"), Ticket(std::string(64, '0'))}) {
    const auto stranger = ClientSocket::connect(context_, *resolver_, server->endpoint(), ticket).value();
    std::optional<ConnectionEvent> event;
    const auto deadline = Clock::now() + kPatience;
    while (!event && Clock::now() < deadline) event = stranger->try_event();
    ASSERT_TRUE(event);
    EXPECT_EQ(event->kind, ConnectionEvent::Kind::kRefused);
  }
  // Neither does a key of the pool let anyone in there, nor no mechanism at all.
  const auto keyed = ClientSocket::connect(context_, *resolver_, server->endpoint(), keys_.pair(Role::kTrainer),
                                           keys_.public_key(Role::kWorker))
                         .value();
  const std::unique_ptr<void, int (*)(void*)> bare(zmq_socket(context_.zmq().handle(), ZMQ_DEALER), &zmq_close);
  const int zero = 0;
  zmq_setsockopt(bare.get(), ZMQ_LINGER, &zero, sizeof zero);
  ASSERT_EQ(zmq_connect(bare.get(), server->endpoint().text().c_str()), 0);
  zmq_send(bare.get(), "x", 1, ZMQ_DONTWAIT);
  const auto deadline = Clock::now() + std::chrono::milliseconds(300);
  while (Clock::now() < deadline) {
    ASSERT_TRUE(server->receive());
    const auto event = keyed->try_event();
    EXPECT_FALSE(event && event->kind == ConnectionEvent::Kind::kConnected);
  }
  EXPECT_EQ(zmq_recv(bare.get(), nullptr, 0, ZMQ_DONTWAIT), -1);
  EXPECT_TRUE(has_joined(*server, *client)) << "the trainer is let in all the same";
}

TEST_F(DataSocketsTest, LinkThatHasEndedLetsNobodyIn) {
  const auto server = serve_data();
  const auto client = trainer(*server);
  server->end();
  EXPECT_FALSE(has_joined(*server, *client, std::chrono::milliseconds(300)));
}

TEST_F(DataSocketsTest, NextLinkEndsTheOneBefore) {
  const auto server = serve_data();
  const auto before = trainer(*server);
  ASSERT_TRUE(has_joined(*server, *before));
  const auto after = trainer(*server, {.trainer_id = 7, .worker_id = 5, .link = 4});
  EXPECT_FALSE(server->has_room());
  ASSERT_TRUE(has_joined(*server, *after));
  send(*server, 1, Bytes(10));
  EXPECT_EQ(next(*after), Outcome::kPiece);
  EXPECT_EQ(before->try_receive(), Outcome::kNothing);
}

// ---- Wires that change what crosses

// A worker's end that hands over the messages which the test has made of those that were sealed.
class AlteredWire : public DataSocketsTest {
 protected:
  AlteredWire() {
    const wire::SealOffer offer{.ciphers = fast_ciphers(), .nonce = draw_seal_nonce().value()};
    const auto grant = server_.begin(kLink.trainer_id, kLink.link, offer).value();
    client_ = DataClient::connect(context_, *resolver_, kLink, offer, grant).value();
    const auto deadline = Clock::now() + kPatience;
    while (!server_.has_room() && Clock::now() < deadline) {
      static_cast<void>(client_->try_event());
      EXPECT_TRUE(server_.receive());
    }
    for (uint64_t counter = 1; counter <= 3; ++counter) messages_.push_back(sealed(counter, kLink));
  }

  Bytes sealed(uint64_t counter, const LinkName& name, uint64_t key_counter = 0) {
    const auto head = wire::write_piece_head({.sender = name.worker_id,
                                              .link = name.link,
                                              .counter = counter,
                                              .key = {.epoch = 1, .sequence = counter},
                                              .payload_bytes = 1000});
    return server_.seal(head, key_counter == 0 ? counter : key_counter, Bytes(1000, std::byte{1}));
  }

  void cross(const std::vector<Bytes>& messages) {
    for (const Bytes& message : messages) ASSERT_TRUE(server_.send_bytes(message));
  }
  // How many pieces were good before one was not.
  size_t good_count() {
    for (size_t count = 0;; ++count) {
      const Outcome outcome = next(*client_);
      Bytes opened(1000);
      if (outcome != Outcome::kPiece || client_->piece().size() != 1000 || !client_->open(opened)) return count;
      EXPECT_EQ(opened, Bytes(1000, std::byte{1}));
    }
  }

  HandDataServer server_{context_, *authenticator_, kLink.worker_id};
  std::unique_ptr<DataClient> client_;
  std::vector<Bytes> messages_;
};

TEST_F(AlteredWire, FlippedBitIsSeenWhereverItIs) {
  messages_.resize(1);
  // Each bit of the first one in turn would need as many links; one in the middle of each field and of the bytes does.
  messages_[0][500] ^= std::byte{4};
  cross(messages_);
  EXPECT_EQ(good_count(), 0u);
  EXPECT_NE(client_->fault().find("authentication tag"), std::string::npos) << client_->fault();
}

TEST_F(AlteredWire, ChangedHeadIsSeen) {
  messages_[1][32] ^= std::byte{1};  // the number of the batch
  cross(messages_);
  EXPECT_EQ(good_count(), 1u);
}

TEST_F(AlteredWire, RepeatedPieceIsSeen) {
  cross({messages_[0], messages_[1], messages_[1], messages_[2]});
  EXPECT_EQ(good_count(), 2u);
  EXPECT_NE(client_->fault().find("repeated"), std::string::npos) << client_->fault();
}

TEST_F(AlteredWire, AnotherOrderIsSeen) {
  cross({messages_[0], messages_[2], messages_[1]});
  EXPECT_EQ(good_count(), 1u);
}

TEST_F(AlteredWire, LostPieceIsSeen) {
  cross({messages_[1], messages_[2]});
  EXPECT_EQ(good_count(), 0u);
}

TEST_F(AlteredWire, TruncatedPieceIsSeen) {
  messages_[1].resize(messages_[1].size() - 1);
  cross(messages_);
  EXPECT_EQ(good_count(), 1u);
}

TEST_F(AlteredWire, PieceOfAnotherLinkOrWorkerIsSeen) {
  cross({sealed(1, {.trainer_id = 7, .worker_id = 5, .link = 4})});
  EXPECT_EQ(good_count(), 0u);
  EXPECT_NE(client_->fault().find("another connection"), std::string::npos) << client_->fault();
}

TEST_F(AlteredWire, PieceThatWasSealedForAnotherPlaceIsSeen) {
  cross({sealed(1, kLink, 2)});
  EXPECT_EQ(good_count(), 0u);
}

TEST_F(AlteredWire, JoinThatComesBackIsSeen) {
  const auto head = wire::write_piece_head(
      {.kind = wire::PieceHead::Kind::kJoin, .sender = kLink.trainer_id, .link = kLink.link, .counter = 1});
  Bytes message(head.begin(), head.end());
  message.resize(head.size() + wire::kSealTagBytes);
  cross({message});
  EXPECT_EQ(good_count(), 0u);
}

}  // namespace
}  // namespace penstock::net
