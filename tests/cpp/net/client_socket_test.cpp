// SPDX-License-Identifier: Apache-2.0
#include "net/client_socket.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../base/child_process.h"
#include "../base/temp_folder.h"
#include "base/clock.h"
#include "base/process.h"
#include "net/key_folder.h"
#include "net/key_making.h"
#include "pool_sockets.h"
#include "wire/control_record.h"

namespace penstock::net {
namespace {

class ClientSocketTest : public PoolSocketsTest {
 protected:
  // A trainer's, for whom a controller has these keys.
  KeyRing ring_with(const PublicKey& controller, const PublicKey& former) const {
    PublicKeys keys = keys_.ring(Role::kTrainer).public_keys();
    keys.roles[static_cast<size_t>(Role::kController)] = controller;
    keys.former[static_cast<size_t>(Role::kController)] = former;
    return {Role::kTrainer, PoolKeys::copy_of(keys_.pair(Role::kTrainer)), std::move(keys), KeyOrigin::kGiven};
  }
  std::unique_ptr<ClientSocket> connect_to_controller(const Endpoint& endpoint, const KeyRing& keys) {
    auto client = ClientSocket::connect(context_, *resolver_, endpoint, keys, Role::kController);
    EXPECT_TRUE(client) << client.error().message;
    return client ? std::move(client).value() : nullptr;
  }
  // The next event that is no refusal.
  static std::optional<ConnectionEvent> event_after_refusals(ClientSocket& client) {
    auto event = next_event(client);
    while (event && event->kind == ConnectionEvent::Kind::kRefused) event = next_event(client);
    return event;
  }
};

TEST_F(ClientSocketTest, BeforeTheServerIsThereNothingIsSentOrQueued) {
  const Endpoint endpoint = free_endpoint();
  const auto client = connect(endpoint, keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
  EXPECT_EQ(client->send(filled(1, 1)).error().code, Errc::kClosed);
  EXPECT_FALSE(client->is_connected());
  const auto server = serve_again(endpoint);
  ASSERT_TRUE(server);
  expect_connected(*client);
  EXPECT_TRUE(client->is_connected());
  ASSERT_TRUE(client->send(filled(1, 2)));
  EXPECT_EQ(copy_of(next_message(*server)->parts.at(0)), filled(1, 2));
}

TEST_F(ClientSocketTest, ConnectsAgainToAServerThatComesBack) {
  auto server = serve({.allowed_roles = {Role::kTrainer}});
  const Endpoint endpoint = server->endpoint();
  const auto client = connect(*server, Role::kTrainer);
  expect_connected(*client);
  server.reset();
  const auto gone = next_event(*client);
  ASSERT_TRUE(gone);
  EXPECT_EQ(gone->kind, ConnectionEvent::Kind::kDisconnected);
  EXPECT_FALSE(client->is_connected());
  server = serve_again(endpoint);
  ASSERT_TRUE(server);
  expect_connected(*client);
  ASSERT_TRUE(client->send(filled(1, 2)));
  EXPECT_EQ(copy_of(next_message(*server)->parts.at(0)), filled(1, 2));
}

TEST_F(ClientSocketTest, IsToBeLookedAtAgainOnlyWhileAConnectionThatEndedIsNotThereAgain) {
  auto server = serve({.allowed_roles = {Role::kTrainer}});
  const Endpoint endpoint = server->endpoint();
  const auto client = connect(*server, Role::kTrainer);
  expect_connected(*client);
  EXPECT_FALSE(client->due_at());
  server.reset();
  ASSERT_TRUE(next_event(*client));
  ASSERT_TRUE(client->due_at());
  server = serve_again(endpoint);
  ASSERT_TRUE(server);
  expect_connected(*client);
  EXPECT_FALSE(client->due_at());
}

TEST_F(ClientSocketTest, AfterARefusalItConnectsWhenItIsToldTo) {
  auto server = serve({.allowed_roles = {Role::kWorker}});
  const Endpoint endpoint = server->endpoint();
  const auto client = connect(*server, Role::kTrainer);
  const auto event = next_event(*client);
  ASSERT_TRUE(event);
  ASSERT_EQ(event->kind, ConnectionEvent::Kind::kRefused);
  EXPECT_TRUE(event->is_final);
  server.reset();
  server = serve_again(endpoint);
  ASSERT_TRUE(server);
  ASSERT_TRUE(client->reconnect());
  expect_connected(*client);
  ASSERT_TRUE(client->send(filled(1, 2)));
  EXPECT_EQ(copy_of(next_message(*server)->parts.at(0)), filled(1, 2));
}

TEST_F(ClientSocketTest, AConnectionThatIsBegunAnewIsAnotherPeer) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  const auto client = connect(*server, Role::kTrainer);
  ASSERT_TRUE(wait_and_send(*client, filled(1, 1)));
  const auto first = next_message(*server);
  ASSERT_TRUE(first);
  ASSERT_TRUE(client->reconnect());
  EXPECT_FALSE(client->is_connected());
  while (!client->is_connected()) ASSERT_TRUE(next_event(*client));
  ASSERT_TRUE(client->send(filled(1, 2)));
  const auto second = next_message(*server);
  ASSERT_TRUE(second);
  EXPECT_NE(second->peer.routing_id, first->peer.routing_id);
}

TEST_F(ClientSocketTest, ConnectsByItselfOnceTheServerHasTheRightKey) {
  auto other = serve({.allowed_roles = {Role::kTrainer}}, Role::kWorker);
  const Endpoint endpoint = other->endpoint();
  const auto client = connect(endpoint, keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
  const auto refused = next_event(*client);
  ASSERT_TRUE(refused);
  ASSERT_EQ(refused->kind, ConnectionEvent::Kind::kRefused);
  EXPECT_FALSE(refused->is_final);
  other.reset();
  const auto server = serve_again(endpoint);
  ASSERT_TRUE(server);
  auto event = next_event(*client);
  while (event && event->kind == ConnectionEvent::Kind::kRefused) event = next_event(*client);
  ASSERT_TRUE(event);
  EXPECT_EQ(event->kind, ConnectionEvent::Kind::kConnected);
}

// A controller that was started with other keys than its clients had lost them all.
TEST_F(ClientSocketTest, KnowsAServerByEitherKeyOfItsRoleWithoutAWord) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  const PublicKey other = KeyPair::generate().public_key(), right = keys_.public_key(Role::kController);
  for (const KeyRing& keys : {ring_with(right, other), ring_with(other, right)}) {
    const auto client = connect_to_controller(server->endpoint(), keys);
    expect_connected(*client);
    EXPECT_FALSE(client->due_at());
    ASSERT_TRUE(client->send(filled(1, 2)));
    EXPECT_EQ(copy_of(next_message(*server)->parts.at(0)), filled(1, 2));
  }
}

TEST_F(ClientSocketTest, GoesOnWithTheOtherKeyWhenAServerComesBackWithIt) {
  auto server = serve({.allowed_roles = {Role::kTrainer}}, Role::kWorker);
  const Endpoint endpoint = server->endpoint();
  const auto client =
      connect_to_controller(endpoint, ring_with(keys_.public_key(Role::kController), keys_.public_key(Role::kWorker)));
  expect_connected(*client);
  server.reset();
  const auto gone = next_event(*client);
  ASSERT_TRUE(gone);
  EXPECT_EQ(gone->kind, ConnectionEvent::Kind::kDisconnected);
  server = serve_again(endpoint);  // with the key of a controller
  ASSERT_TRUE(server);
  const auto event = event_after_refusals(*client);
  ASSERT_TRUE(event);
  EXPECT_EQ(event->kind, ConnectionEvent::Kind::kConnected);
}

TEST_F(ClientSocketTest, ServerThatHasNeitherKeyIsToldAndTriedAgainAfterAPause) {
  auto other = serve({.allowed_roles = {Role::kTrainer}}, Role::kWorker);
  const Endpoint endpoint = other->endpoint();
  const auto client = connect_to_controller(
      endpoint, ring_with(keys_.public_key(Role::kOperator), keys_.public_key(Role::kController)));
  for (int round = 0; round < 3; ++round) {
    expect_refused(*client, "a different key");
    EXPECT_TRUE(client->due_at());
  }
  other.reset();
  const auto server = serve_again(endpoint);
  ASSERT_TRUE(server);
  const auto event = event_after_refusals(*client);
  ASSERT_TRUE(event);
  EXPECT_EQ(event->kind, ConnectionEvent::Kind::kConnected);
  ASSERT_TRUE(client->send(filled(1, 2)));
  EXPECT_EQ(copy_of(next_message(*server)->parts.at(0)), filled(1, 2));
}

TEST_F(ClientSocketTest, ReadsTheKeysAgainForAServerThatHasNoneThatItKnows) {
  const test::TempFolder temp;
  const std::string folder = temp / "keys";
  ASSERT_TRUE(make_key_folder(folder));
  const KeyRing before = load_key_folder(folder, Role::kTrainer).value();
  ASSERT_TRUE(rotate_keys(folder));
  const auto server =
      ServerSocket::bind(context_, *authenticator_, {.host = "127.0.0.1", .port = 0},
                         load_key_folder(folder, Role::kController).value(), {.allowed_roles = {Role::kTrainer}})
          .value();
  const auto client = connect_to_controller(server->endpoint(), before);
  const auto event = event_after_refusals(*client);
  ASSERT_TRUE(event);
  ASSERT_EQ(event->kind, ConnectionEvent::Kind::kConnected);
  ASSERT_TRUE(client->send(filled(1, 2)));
  const auto received = next_message(*server);
  ASSERT_TRUE(received);
  EXPECT_EQ(received->peer.identity.key, before.own().public_key()) << "its own key is the one that it began with";
}

TEST_F(ClientSocketTest, ManyClientsOfOneProcessAreServed) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  std::vector<std::unique_ptr<ClientSocket>> clients;
  for (int index = 0; index < 400; ++index) clients.push_back(connect(*server, Role::kTrainer));
  for (const auto& client : clients) ASSERT_TRUE(wait_and_send(*client, filled(1, 1)));
  for (size_t index = 0; index < clients.size(); ++index) ASSERT_TRUE(next_message(*server));
}

// A roster holds 4,096 workers; the 1,365th could not be connected to.
TEST_F(ClientSocketTest, ProcessHasSocketsForEveryWorkerOfARoster) {
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit raised{.rlim_cur = limit.rlim_max, .rlim_max = limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &raised), 0);
  const Endpoint endpoint = free_endpoint();
  std::vector<std::unique_ptr<ClientSocket>> clients;
  for (size_t index = 0; index < wire::kRosterCountMax; ++index) {
    auto client = connect(endpoint, keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
    ASSERT_TRUE(client) << index;
    clients.push_back(std::move(client));
  }
  clients.clear();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST_F(ClientSocketTest, AnEndpointThatNamesNoServerIsRefused) {
  for (const auto* text : {"tcp://127.0.0.1:0", "tcp://*:5555"}) {
    const auto client = ClientSocket::connect(context_, *resolver_, Endpoint::parse(text).value(),
                                              keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
    ASSERT_FALSE(client);
    EXPECT_EQ(client.error().code, Errc::kMalformed);
  }
}

TEST_F(ClientSocketTest, WaitingWakesForMessagesEventsAndDescriptors) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  const auto client = connect(*server, Role::kTrainer);
  // The connection is an event; then the answer is a message.
  ASSERT_TRUE(wait_readable(client->waitables(), {}, {}, kPatience));
  expect_connected(*client);
  ASSERT_TRUE(client->send(filled(1, 1)));
  const auto question = next_message(*server);
  ASSERT_TRUE(question);
  ASSERT_TRUE(server->send(question->peer.routing_id, filled(1, 2)));
  ASSERT_TRUE(wait_readable(client->waitables(), {}, {}, kPatience));
  EXPECT_TRUE(next_message(*client));
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  ASSERT_EQ(::write(ends[1], "x", 1), 1);
  const std::array<int, 1> fds = {ends[0]};
  std::array<bool, 1> is_readable = {false};
  const Waitable waitables[] = {client->waitables()[0], client->waitables()[1], server->waitable()};
  ASSERT_TRUE(wait_readable(waitables, fds, is_readable, kPatience));
  EXPECT_TRUE(is_readable[0]);
  for (const int fd : ends) ::close(fd);
}

// A trainer's stream stood still for good: a worker had left just after the trainer closed its socket, whose connection
// was still there, and libzmq's thread waited for someone to tell that it had ended.
TEST_F(ClientSocketTest, AConnectionThatEndsAfterItsClientWasClosedStopsNoOther) {
  const wire::MessageLimits limits{.received_messages_max = 2, .sent_messages_max = 4};
  const std::vector<std::byte> unread(1'000'000, std::byte{1});
  for (int round = 0; round < 3; ++round) {
    auto server = serve({.allowed_roles = {Role::kTrainer}, .limits = limits});
    auto client = connect(*server, Role::kTrainer, {.limits = limits});
    expect_connected(*client);
    while (client->send(unread)) {
    }
    client->set_linger(std::chrono::seconds(10));
    client.reset();
    server.reset();
    const auto other_server = serve({.allowed_roles = {Role::kTrainer}});
    const auto other = connect(*other_server, Role::kTrainer);
    expect_connected(*other);
  }
}

// How often payloads that are not copied were released.
class Releases : public PoolSocketsTest {
 protected:
  OutgoingPart payload(size_t size) {
    const size_t index = memories_.size();
    const auto& memory = memories_.emplace_back(size, std::byte{3});
    return {.bytes = memory, .release = [this, index] { ++counts_[index]; }};
  }
  static Result<void> send(ClientSocket& client, OutgoingPart part) { return client.send(std::span(&part, 1)); }
  static Result<void> send(ServerSocket& server, const std::string& routing_id, OutgoingPart part) {
    return server.send(routing_id, std::span(&part, 1));
  }
  // That each was released once, and all of them when ZeroMQ has ended.
  void expect_all_released() {
    for (size_t index = 0; index < memories_.size(); ++index) EXPECT_EQ(counts_[index], 1) << index;
  }

  std::list<std::vector<std::byte>> memories_;
  std::array<std::atomic<int>, 1000> counts_{};
};

TEST_F(Releases, OfWhatArrivesComeOnceTheBytesAreOnTheirWay) {
  auto server = serve({.allowed_roles = {Role::kTrainer}});
  auto client = connect(*server, Role::kTrainer);
  expect_connected(*client);
  for (const size_t size : {size_t{0}, size_t{1}, size_t{33}, size_t{100'000}, size_t{wire::kPartBytesMax}}) {
    std::promise<void> released;
    OutgoingPart part = payload(size);
    part.release = [&released, counted = std::move(part.release)] {
      counted();
      released.set_value();
    };
    ASSERT_TRUE(send(*client, std::move(part)));
    EXPECT_EQ(next_message(*server)->parts.at(0).bytes().size(), size);
    EXPECT_EQ(released.get_future().wait_for(kPatience), std::future_status::ready) << size;
  }
  client.reset();
  server.reset();
  end();
  expect_all_released();
}

TEST_F(Releases, OfWhatCannotBeSentComeAtOnce) {
  auto server = serve({.allowed_roles = {Role::kTrainer}});
  auto client = connect(free_endpoint(), keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
  EXPECT_EQ(send(*client, payload(100)).error().code, Errc::kClosed);
  EXPECT_EQ(send(*client, payload(wire::kPartBytesMax + 1)).error().code, Errc::kTooLarge);
  EXPECT_EQ(send(*server, std::string("\0abcd", 5), payload(100)).error().code, Errc::kClosed);
  expect_all_released();
  std::vector<OutgoingPart> parts;
  for (int index = 0; index < 3; ++index) parts.push_back(payload(10));
  EXPECT_FALSE(server->send("nobody", parts));
  expect_all_released();
  client.reset();
  server.reset();
  end();
  expect_all_released();
}

TEST_F(Releases, OfWhatIsQueuedForAPeerThatDoesNotReadComeWhenItGoes) {
  auto server = serve({.allowed_roles = {Role::kTrainer}});
  auto client = connect(*server, Role::kTrainer);
  ASSERT_TRUE(wait_and_send(*client, filled(1, 1)));
  const std::string routing_id = next_message(*server)->peer.routing_id;
  while (memories_.size() < 100 && send(*server, routing_id, payload(1'000'000))) {
  }
  EXPECT_EQ(memories_.size(), 100u);
  client.reset();
  server.reset();
  end();
  expect_all_released();
}

TEST_F(Releases, OfWhatIsQueuedComeWhenTheSenderCloses) {
  auto server = serve({.allowed_roles = {Role::kTrainer}});
  auto client = connect(*server, Role::kTrainer);
  ASSERT_TRUE(wait_and_send(*client, filled(1, 1)));
  const std::string routing_id = next_message(*server)->peer.routing_id;
  for (int index = 0; index < 100; ++index) ASSERT_TRUE(send(*server, routing_id, payload(1'000'000)));
  server.reset();
  client.reset();
  end();
  expect_all_released();
}

TEST_F(Releases, OfWhatFindsNoRoomComeAtOnceAndTheRestIsBounded) {
  const wire::MessageLimits limits{.received_messages_max = 2, .sent_messages_max = 4};
  auto server = serve({.allowed_roles = {Role::kTrainer}, .limits = limits});
  auto client = connect(*server, Role::kTrainer, {.limits = limits});
  ASSERT_TRUE(wait_and_send(*client, filled(1, 1)));
  const std::string routing_id = next_message(*server)->peer.routing_id;
  Result<void> sent;
  while (sent && memories_.size() < counts_.size()) sent = send(*server, routing_id, payload(4'000'000));
  ASSERT_FALSE(sent);
  EXPECT_EQ(sent.error().code, Errc::kClosed);
  EXPECT_EQ(counts_[memories_.size() - 1], 1) << "what was not sent";
  EXPECT_LT(memories_.size(), 100u);
  client.reset();
  server.reset();
  end();
  expect_all_released();
}

// The effect on sockets of a process that was forked from their owner.
struct PoolOfSockets {
  explicit PoolOfSockets(const PoolKeys& keys)
      : authenticator(Authenticator::start(context).value()),
        server(ServerSocket::bind(context, *authenticator, Endpoint::parse("tcp://127.0.0.1:0").value(),
                                  keys.ring(Role::kController), {.allowed_roles = {Role::kTrainer}})
                   .value()),
        client(ClientSocket::connect(context, *resolver, server->endpoint(), keys.pair(Role::kTrainer),
                                     keys.public_key(Role::kController))
                   .value()) {}
  std::unique_ptr<Resolver> resolver = Resolver::open().value();
  SocketContext context;
  std::unique_ptr<Authenticator> authenticator;
  std::unique_ptr<ServerSocket> server;
  std::unique_ptr<ClientSocket> client;
};

TEST_F(ClientSocketTest, AForkedChildThatDropsTheSocketsLeavesItsParentsAlone) {
  auto sockets = std::make_unique<ProcessBound<PoolOfSockets>>(std::make_unique<PoolOfSockets>(keys_));
  PoolOfSockets& pool = **sockets;
  ASSERT_TRUE(wait_and_send(*pool.client, filled(1, 1)));
  const auto before = next_message(*pool.server);
  ASSERT_TRUE(before);
  EXPECT_EQ(test::in_child([&]() -> std::string {
              sockets.reset();
              return "";
            }),
            "");
  ASSERT_TRUE(pool.server->send(before->peer.routing_id, filled(1, 2)));
  EXPECT_EQ(copy_of(next_message(*pool.client)->parts.at(0)), filled(1, 2));
  const auto second = ClientSocket::connect(pool.context, *pool.resolver, pool.server->endpoint(),
                                            keys_.pair(Role::kTrainer), keys_.public_key(Role::kController));
  ASSERT_TRUE(wait_and_send(*second.value(), filled(1, 3)));
  EXPECT_TRUE(next_message(*pool.server));
}

TEST_F(ClientSocketTest, AForkedChildMakesSocketsOfItsOwn) {
#if defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the thread sanitizer ends a child that was forked from several threads and starts one";
#endif
  auto sockets = std::make_unique<ProcessBound<PoolOfSockets>>(std::make_unique<PoolOfSockets>(keys_));
  expect_connected(*(*sockets)->client);
  EXPECT_EQ(test::in_child([&]() -> std::string {
              sockets.reset();
              PoolOfSockets own(keys_);
              expect_connected(*own.client);
              return HasFailure() ? "the child's own client was not served" : "";
            }),
            "");
}

}  // namespace
}  // namespace penstock::net
