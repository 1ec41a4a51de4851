// SPDX-License-Identifier: Apache-2.0
#include "net/authenticator.h"

#include <gtest/gtest.h>
#include <zmq.h>

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "pool_sockets.h"

namespace penstock::net {
namespace {

using Frames = std::vector<std::string>;

class AuthenticatorTest : public PoolSocketsTest {
 protected:
  // Asks as libzmq does, and returns the status and the user id.
  std::pair<std::string, std::string> ask(const Frames& request) {
    const std::unique_ptr<void, int (*)(void*)> socket(zmq_socket(context_.zmq().handle(), ZMQ_REQ), &zmq_close);
    const int zero = 0;
    zmq_setsockopt(socket.get(), ZMQ_LINGER, &zero, sizeof zero);
    EXPECT_EQ(zmq_connect(socket.get(), "inproc://zeromq.zap.01"), 0);
    for (size_t index = 0; index < request.size(); ++index) {
      zmq_send(socket.get(), request[index].data(), request[index].size(),
               index + 1 < request.size() ? ZMQ_SNDMORE : 0);
    }
    Frames reply;
    char bytes[512];
    do {
      const int length = zmq_recv(socket.get(), bytes, sizeof bytes, 0);
      reply.emplace_back(bytes, static_cast<size_t>(length));
    } while (has_more(socket.get()));
    EXPECT_EQ(reply.size(), 6u);
    EXPECT_EQ(reply.at(1), request.size() > 1 ? request[1] : "");
    return {reply.at(2), reply.at(4)};
  }

  static std::string key_text(const PublicKey& key) {
    return {reinterpret_cast<const char*>(key.bytes().data()), kKeyBytes};
  }

  const PublicKey key_ = keys_.public_key(Role::kTrainer);
  const std::unique_ptr<Authenticator::Domain> domain_ = authenticator_->make_domain({{key_, Role::kTrainer}});
  const Frames good_ = {"1.0", "1", domain_->name(), "127.0.0.1", "", "CURVE", key_text(key_)};

 private:
  static bool has_more(void* socket) {
    int more = 0;
    size_t length = sizeof more;
    zmq_getsockopt(socket, ZMQ_RCVMORE, &more, &length);
    return more != 0;
  }
};

TEST_F(AuthenticatorTest, AnAllowedKeyIsLetInUnderItsRoleAndText) {
  EXPECT_EQ(ask(good_), std::make_pair(std::string("200"), "trainer " + key_.text()));
}

TEST_F(AuthenticatorTest, ATicketIsGoodOnceAndOnlyWhereItIsExpected) {
  const Frames shown = {"1.0", "1", domain_->name(), "127.0.0.1", "", "PLAIN", "ticket", "abc"};
  EXPECT_EQ(ask(shown).first, "400");
  domain_->expect(Ticket("abc"));
  for (const auto& [frame, text] : {std::pair(6, "Ticket"), std::pair(7, "abd"), std::pair(7, ""), std::pair(7, "abcd"),
                                    std::pair(5, "CURVE"), std::pair(2, "penstock")}) {
    Frames other = shown;
    other[static_cast<size_t>(frame)] = text;
    EXPECT_EQ(ask(other).first, "400") << text;
  }
  const auto elsewhere = authenticator_->make_domain({});
  Frames there = shown;
  there[2] = elsewhere->name();
  EXPECT_EQ(ask(there).first, "400");
  EXPECT_EQ(ask(shown), std::make_pair(std::string("200"), std::string("ticket")));
  EXPECT_EQ(ask(shown).first, "400");
  domain_->expect(Ticket("abc"));
  domain_->expect(Ticket("def"));
  EXPECT_EQ(ask(shown).first, "400");
  EXPECT_EQ(ask(good_).first, "200");
}

TEST_F(AuthenticatorTest, EverythingElseIsTurnedAway) {
  std::vector<Frames> requests;
  const auto change = [&](size_t frame, const std::string& text) {
    requests.push_back(good_);
    requests.back()[frame] = text;
  };
  change(0, "2.0");
  change(2, "");
  change(2, "penstock");
  change(2, domain_->name() + "1");
  change(5, "NULL");
  change(5, "PLAIN");
  change(5, "");
  change(6, "");
  change(6, key_.text());
  change(6, key_text(keys_.public_key(Role::kWorker)));
  change(6, key_text(key_) + "x");
  for (size_t size = 1; size < good_.size(); ++size) requests.emplace_back(good_.begin(), good_.begin() + size);
  requests.push_back(good_);
  requests.back().emplace_back("more");
  requests.push_back(Frames(200, ""));
  for (const Frames& request : requests) EXPECT_EQ(ask(request), std::make_pair(std::string("400"), std::string()));
  EXPECT_EQ(authenticator_->refused_count(), requests.size());
  EXPECT_EQ(ask(good_).first, "200");
}

TEST_F(AuthenticatorTest, ADomainThatIsGoneLetsNobodyIn) {
  auto other = authenticator_->make_domain({{key_, Role::kTrainer}});
  Frames request = good_;
  request[2] = other->name();
  EXPECT_EQ(ask(request).first, "200");
  other.reset();
  EXPECT_EQ(ask(request).first, "400");
}

TEST_F(AuthenticatorTest, OneWhoseThreadHasFailedSaysSoToItsServer) {
  SocketContext context;
  const auto authenticator = Authenticator::start(context).value();
  EXPECT_TRUE(authenticator->health());
  context.zmq().shutdown();  // the sockets of its thread fail
  while (authenticator->health()) std::this_thread::yield();
  EXPECT_NE(authenticator->health().error().message.find("waiting for key requests failed"), std::string::npos);
}

TEST_F(AuthenticatorTest, ASecondOneOnAContextIsAnError) { EXPECT_FALSE(Authenticator::start(context_)); }

// With nobody to ask, libzmq lets every CURVE client in unless it is told not to.
class WithoutAuthenticator : public PoolSocketsTest {
 protected:
  WithoutAuthenticator() { authenticator_.reset(); }
};

TEST_F(WithoutAuthenticator, LibzmqItselfLetsAnUnknownKeyIn) {
  const std::unique_ptr<void, int (*)(void*)> server(zmq_socket(context_.zmq().handle(), ZMQ_ROUTER), &zmq_close);
  const int one = 1;
  const auto secret = keys_.pair(Role::kController).secret_key().bytes();
  ASSERT_EQ(zmq_setsockopt(server.get(), ZMQ_CURVE_SERVER, &one, sizeof one), 0);
  ASSERT_EQ(zmq_setsockopt(server.get(), ZMQ_CURVE_SECRETKEY, secret.data(), secret.size()), 0);
  ASSERT_EQ(zmq_setsockopt(server.get(), ZMQ_ZAP_DOMAIN, "penstock", 8), 0);
  ASSERT_EQ(zmq_bind(server.get(), "tcp://127.0.0.1:*"), 0);
  char bound[256];
  size_t length = sizeof bound;
  ASSERT_EQ(zmq_getsockopt(server.get(), ZMQ_LAST_ENDPOINT, bound, &length), 0);
  // On a busy machine libzmq itself gives a handshake up now and then, after its interval: another client tries again.
  std::optional<ConnectionEvent> event;
  for (int attempt = 0; attempt < 3 && !(event && event->kind == ConnectionEvent::Kind::kConnected); ++attempt) {
    const auto client =
        connect(Endpoint::parse(bound).value(), KeyPair::generate(), keys_.public_key(Role::kController));
    event = next_event(*client);
  }
  ASSERT_TRUE(event);
  EXPECT_EQ(event->kind, ConnectionEvent::Kind::kConnected) << event->reason;
}

TEST_F(WithoutAuthenticator, AServerOfOursLetsNobodyIn) {
  const std::string domain = "penstock";
  const auto server =
      TcpSocket::open_server(
          context_,
          {.own = keys_.pair(Role::kController), .zap_domain = domain, .handshake_interval = kHandshakeInterval}, {})
          .value();
  const auto endpoint = server->listen({.host = "127.0.0.1", .port = 0}, KeyOrigin::kGiven).value();
  const auto client = connect(endpoint, keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
  const auto event = next_event(*client);
  ASSERT_TRUE(event);
  EXPECT_EQ(event->kind, ConnectionEvent::Kind::kRefused);
}

TEST(PeerIdentity, IsReadFromWhatIsWrittenAndFromNothingElse) {
  const PeerIdentity identity{.role = Role::kWorker, .key = KeyPair::generate().public_key()};
  EXPECT_EQ(PeerIdentity::parse(identity.user_id()), identity);
  for (const auto& text :
       {std::string(), std::string("worker"), "worker" + identity.key.text(), "boss " + identity.key.text(),
        "worker " + identity.key.text() + " ", "worker  " + identity.key.text(), std::string("worker ~")}) {
    EXPECT_EQ(PeerIdentity::parse(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace penstock::net
