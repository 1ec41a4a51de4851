// SPDX-License-Identifier: Apache-2.0
// Strangers at a server's port, and peers with a key that behave badly: the server's answer to each, and that a good
// client is served within a second all the while.
#include <gtest/gtest.h>
#include <zmq.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "curve_by_hand.h"
#include "pool_sockets.h"
#include "tcp_connection.h"

namespace penstock::net {
namespace {

using std::chrono::milliseconds;
using test::Bytes;
using test::bytes_of;
using test::CurveByHand;
using test::TcpConnection;

// A socket of libzmq's own, with nothing of ours around it.
class RawSocket {
 public:
  RawSocket(SocketContext& context, int type) : socket_(zmq_socket(context.zmq().handle(), type)) {
    set(ZMQ_LINGER, 0);
  }
  RawSocket(const RawSocket&) = delete;
  RawSocket& operator=(const RawSocket&) = delete;
  ~RawSocket() { zmq_close(socket_); }

  void set(int option, int value) { EXPECT_EQ(zmq_setsockopt(socket_, option, &value, sizeof value), 0); }
  void set(int option, std::span<const std::byte> value) {
    EXPECT_EQ(zmq_setsockopt(socket_, option, value.data(), value.size()), 0);
  }
  void use_keys(const KeyPair& own, const PublicKey& server_key) {
    set(ZMQ_CURVE_SERVERKEY, server_key.bytes());
    set(ZMQ_CURVE_PUBLICKEY, own.public_key().bytes());
    set(ZMQ_CURVE_SECRETKEY, own.secret_key().bytes());
  }
  void connect(const Endpoint& endpoint) { EXPECT_EQ(zmq_connect(socket_, endpoint.text().c_str()), 0); }
  void send(std::span<const std::byte> bytes, bool is_more = false) {
    EXPECT_EQ(zmq_send(socket_, bytes.data(), bytes.size(), is_more ? ZMQ_SNDMORE : 0), static_cast<int>(bytes.size()));
  }
  void* handle() const { return socket_; }
  zmq::socket_ref ref() const { return zmq::socket_ref(zmq::from_handle, socket_); }

 private:
  void* socket_;
};

class Stranger : public PoolSocketsTest {
 protected:
  // The next event of a socket of libzmq's own.
  std::optional<ConnectionEvent> next_raw_event(ConnectionMonitor& monitor) {
    const auto deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline) {
      if (auto event = monitor.try_event()) return event;
      const Waitable waitables[] = {monitor.waitable()};
      EXPECT_TRUE(wait_readable(waitables, {}, {}, std::chrono::seconds(1)));
    }
    return std::nullopt;
  }

  uint16_t port() const { return server_->endpoint().port; }

  // That whoever was here before left nothing to read, and keeps nobody from being served.
  void expect_unharmed() {
    EXPECT_FALSE(has_message(*server_));
    expect_served(*server_);
  }

  const std::unique_ptr<ServerSocket> server_ =
      serve({.allowed_roles = {Role::kTrainer}, .limits = {}, .handshake_interval = milliseconds(1500)});
};

TEST_F(Stranger, WithAnUnknownKeyIsRefusedAndTold) {
  const KeyPair unknown = KeyPair::generate();
  const auto client = connect(server_->endpoint(), unknown, keys_.public_key(Role::kController));
  expect_refused(*client, "does not accept this key");
  EXPECT_EQ(client->send(filled(1, 1)).error().code, Errc::kClosed);
  EXPECT_EQ(authenticator_->refused_count(), 1u);
  expect_unharmed();
}

TEST_F(Stranger, WithTheKeyOfARoleThatIsNotAllowedIsRefusedAndTold) {
  for (const Role role : {Role::kController, Role::kWorker, Role::kOperator}) {
    expect_refused(*connect(*server_, role), "does not accept this key");
  }
  expect_unharmed();
}

TEST_F(Stranger, ThatExpectsAnotherServerKeyIsRefusedAndTold) {
  const auto client = connect(server_->endpoint(), keys_.pair(Role::kTrainer), KeyPair::generate().public_key());
  expect_refused(*client, "a different key");
  EXPECT_EQ(client->send(filled(1, 1)).error().code, Errc::kClosed);
  expect_unharmed();
}

TEST_F(Stranger, WithoutEncryptionIsRefused) {
  RawSocket plain(context_, ZMQ_DEALER);
  const auto monitor = ConnectionMonitor::watch(context_, plain.ref()).value();
  plain.connect(server_->endpoint());
  plain.send(bytes_of("let me in"));
  const auto event = next_raw_event(*monitor);
  ASSERT_TRUE(event);
  EXPECT_EQ(event->kind, ConnectionEvent::Kind::kRefused) << event->reason;
  expect_unharmed();
}

TEST_F(Stranger, WithAPasswordIsRefused) {
  RawSocket plain(context_, ZMQ_DEALER);
  const auto monitor = ConnectionMonitor::watch(context_, plain.ref()).value();
  plain.set(ZMQ_PLAIN_USERNAME, bytes_of("trainer"));
  plain.set(ZMQ_PLAIN_PASSWORD, bytes_of("trainer"));
  plain.connect(server_->endpoint());
  const auto event = next_raw_event(*monitor);
  ASSERT_TRUE(event);
  EXPECT_EQ(event->kind, ConnectionEvent::Kind::kRefused) << event->reason;
  expect_unharmed();
}

TEST_F(Stranger, ThatSpeaksAnOldProtocolWithoutSecurityIsClosed) {
  for (const auto& opening : {Bytes{std::byte{1}, std::byte{0}, std::byte{2}, std::byte{0}, std::byte{'x'}},  // ZMTP 1
                              [] {
                                Bytes version_2 = test::greeting("");
                                version_2.resize(12);
                                version_2[10] = std::byte{1};
                                version_2[11] = std::byte{5};
                                return version_2;
                              }()}) {
    TcpConnection connection(port());
    static_cast<void>(connection.try_send(opening));
    EXPECT_TRUE(connection.wait_closed());
  }
  expect_unharmed();
}

TEST_F(Stranger, ThatSendsGarbageIsClosed) {
  for (const auto& garbage :
       {bytes_of("GET / HTTP/1.1\r\nHost: a\r\n\r\n"), Bytes(100'000, std::byte{0xff}), Bytes(100'000, std::byte{0})}) {
    TcpConnection connection(port());
    static_cast<void>(connection.try_send(garbage));
    expect_served(*server_);
    EXPECT_TRUE(connection.wait_closed());
  }
  expect_unharmed();
}

TEST_F(Stranger, AreClosedAfterTheHandshakeIntervalHoweverManyTheyAre) {
  std::vector<std::unique_ptr<TcpConnection>> idle;
  for (int index = 0; index < 300; ++index) {
    idle.push_back(std::make_unique<TcpConnection>(port()));
    static_cast<void>(idle.back()->try_send(Bytes(1, std::byte{0xff})));  // the server hears of it only now
  }
  expect_served(*server_);
  for (const auto& connection : idle) ASSERT_TRUE(connection->wait_closed());
  expect_unharmed();
}

TEST_F(Stranger, ThatAnnouncesAGiantFrameIsClosedAndNothingIsAllocated) {
  for (const uint8_t flags : {0, 1, 4}) {
    TcpConnection connection(port());
    ASSERT_TRUE(connection.try_send(test::greeting("CURVE")));
    ASSERT_EQ(connection.receive(64).size(), 64u);
    const uint64_t before = addressed_bytes();
    ASSERT_TRUE(connection.try_send(test::long_head(flags, uint64_t{8} << 30)));
    EXPECT_TRUE(connection.wait_closed());
    EXPECT_LT(addressed_bytes(), before + (uint64_t{512} << 20));
  }
  expect_unharmed();
}

// The misdeeds of a peer that has a key and may connect.
class BadPeer : public Stranger {};

TEST_F(BadPeer, ThatShakesHandsByHandIsServed) {
  CurveByHand peer(port(), keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
  ASSERT_TRUE(peer.try_shake_hands());
  ASSERT_TRUE(peer.connection().try_send(peer.part(bytes_of("hello"), /*is_more=*/false)));
  const auto received = next_message(*server_);
  ASSERT_TRUE(received);
  EXPECT_EQ(copy_of(received->parts.at(0)), bytes_of("hello"));
  EXPECT_EQ(received->peer.identity.role, Role::kTrainer);
}

TEST_F(BadPeer, CannotSayWhoItIs) {
  const PeerIdentity claimed{.role = Role::kController, .key = keys_.public_key(Role::kController)};
  CurveByHand peer(port(), keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
  ASSERT_TRUE(peer.try_shake_hands({{"User-Id", claimed.user_id()}, {"Peer-Address", "10.0.0.1"}, {"__fd", "0"}}));
  ASSERT_TRUE(peer.connection().try_send(peer.part(bytes_of("hello"), /*is_more=*/false)));
  const auto received = next_message(*server_);
  ASSERT_TRUE(received);
  EXPECT_EQ(received->peer.identity, (PeerIdentity{.role = Role::kTrainer, .key = keys_.public_key(Role::kTrainer)}));
  EXPECT_EQ(received->peer.address, "127.0.0.1");
}

TEST_F(BadPeer, ThatClaimsARoutingIdIsReportedAndTakesNobodysPlace) {
  RawSocket peer(context_, ZMQ_DEALER);
  peer.set(ZMQ_ROUTING_ID, bytes_of("worker-1"));
  peer.use_keys(keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
  peer.connect(server_->endpoint());
  peer.send(bytes_of("hello"));
  const auto received = next_message(*server_);
  ASSERT_TRUE(received);
  EXPECT_NE(received->offence.find("routing id"), std::string::npos) << received->offence;
  EXPECT_TRUE(received->parts.empty());
  expect_unharmed();
}

TEST_F(BadPeer, ThatAnnouncesAGiantPartIsClosedAndNothingIsAllocated) {
  CurveByHand peer(port(), keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
  ASSERT_TRUE(peer.try_shake_hands());
  const uint64_t before = addressed_bytes();
  ASSERT_TRUE(peer.connection().try_send(test::long_head(0, uint64_t{8} << 30)));
  EXPECT_TRUE(peer.connection().wait_closed());
  EXPECT_LT(addressed_bytes(), before + (uint64_t{512} << 20));
  expect_unharmed();
}

TEST_F(BadPeer, ThatSendsAPartOneByteAboveTheCapIsClosed) {
  const auto small = serve({.allowed_roles = {Role::kTrainer}, .limits = {.part_bytes_max = 2000}});
  for (const size_t size : {size_t{2000}, size_t{2001}}) {
    CurveByHand peer(small->endpoint().port, keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
    ASSERT_TRUE(peer.try_shake_hands());
    static_cast<void>(peer.connection().try_send(peer.part(Bytes(size), /*is_more=*/false)));
    if (size == 2000) {
      const auto received = next_message(*small);
      ASSERT_TRUE(received);
      EXPECT_EQ(received->parts.at(0).bytes().size(), size);
    } else {
      EXPECT_TRUE(peer.connection().wait_closed());
    }
  }
  EXPECT_FALSE(has_message(*small));
  expect_served(*small);
}

TEST_F(BadPeer, ThatForgesAPartIsClosed) {
  CurveByHand peer(port(), keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
  ASSERT_TRUE(peer.try_shake_hands());
  Bytes part = peer.part(bytes_of("hello"), /*is_more=*/false);
  part.back() ^= std::byte{1};
  ASSERT_TRUE(peer.connection().try_send(part));
  EXPECT_TRUE(peer.connection().wait_closed());
  expect_unharmed();
}

TEST_F(BadPeer, ThatSendsAPartTwiceIsClosed) {
  CurveByHand peer(port(), keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
  ASSERT_TRUE(peer.try_shake_hands());
  const Bytes part = peer.part(bytes_of("hello"), /*is_more=*/false);
  ASSERT_TRUE(peer.connection().try_send(part));
  static_cast<void>(peer.connection().try_send(part));
  ASSERT_TRUE(next_message(*server_));
  EXPECT_TRUE(peer.connection().wait_closed());
  expect_unharmed();
}

TEST_F(BadPeer, ThatSendsManyPartsIsReportedAndNothingIsKept) {
  RawSocket peer(context_, ZMQ_DEALER);
  peer.use_keys(keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
  peer.connect(server_->endpoint());
  const uint64_t before = resident_bytes();
  for (const int part_count : {static_cast<int>(wire::kPartCountMax) + 1, 100'000}) {
    for (int index = 0; index + 1 < part_count; ++index) peer.send(bytes_of("x"), /*is_more=*/true);
    peer.send(bytes_of("x"));
    const auto received = next_message(*server_);
    ASSERT_TRUE(received);
    EXPECT_NE(received->offence.find("parts"), std::string::npos) << received->offence;
    EXPECT_TRUE(received->parts.empty());
    EXPECT_EQ(received->peer.identity.role, Role::kTrainer);
  }
#if defined(__SANITIZE_THREAD__)  // whose own memory grows with what is written
  constexpr uint64_t kGrowthMax = uint64_t{256} << 20;
#else
  constexpr uint64_t kGrowthMax = uint64_t{64} << 20;
#endif
  EXPECT_LT(resident_bytes(), before + kGrowthMax);
  peer.send(bytes_of("well behaved again"));
  EXPECT_EQ(copy_of(next_message(*server_)->parts.at(0)), bytes_of("well behaved again"));
  expect_unharmed();
}

TEST_F(BadPeer, ThatSendsPartsThatAreTooMuchTogetherIsReported) {
  const auto small =
      serve({.allowed_roles = {Role::kTrainer}, .limits = {.part_bytes_max = 2000, .message_bytes_max = 3000}});
  RawSocket peer(context_, ZMQ_DEALER);
  peer.use_keys(keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
  peer.connect(small->endpoint());
  peer.send(Bytes(2000), /*is_more=*/true);
  peer.send(Bytes(1001));
  const auto received = next_message(*small);
  ASSERT_TRUE(received);
  EXPECT_NE(received->offence.find("3000 bytes"), std::string::npos) << received->offence;
  EXPECT_TRUE(received->parts.empty());
  expect_served(*small);
}

}  // namespace
}  // namespace penstock::net
