// SPDX-License-Identifier: Apache-2.0
#include "net/server_socket.h"

#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <iomanip>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "../base/temp_folder.h"
#include "net/key_folder.h"
#include "net/key_making.h"
#include "pool_sockets.h"

namespace penstock::net {
namespace {

class ServerSocketTest : public PoolSocketsTest {
 protected:
  // The inodes of the sockets that this process has open.
  static std::set<std::string> own_sockets() {
    std::set<std::string> inodes;
    DIR* folder = ::opendir("/proc/self/fd");
    while (const dirent* entry = ::readdir(folder)) {
      char target[64] = {};
      if (::readlinkat(::dirfd(folder), entry->d_name, target, sizeof target - 1) < 0) continue;
      const std::string text = target;
      if (text.starts_with("socket:[")) inodes.insert(text.substr(8, text.size() - 9));
    }
    ::closedir(folder);
    return inodes;
  }

  // The addresses at which this process listens, as the kernel writes them: hexadecimal, with the port after a colon.
  static std::set<std::string> listening_addresses() {
    const auto inodes = own_sockets();
    std::set<std::string> addresses;
    for (const auto* path : {"/proc/self/net/tcp", "/proc/self/net/tcp6"}) {
      std::ifstream file(path);
      std::string line;
      std::getline(file, line);
      while (std::getline(file, line)) {
        std::istringstream words(line);
        std::vector<std::string> columns{std::istream_iterator<std::string>(words), {}};
        if (columns.size() > 9 && columns[3] == "0A" && inodes.contains(columns[9])) addresses.insert(columns[1]);
      }
    }
    return addresses;
  }

  static std::string port_text(const ServerSocket& server) {
    std::ostringstream text;
    text << std::uppercase << std::hex << std::setw(4) << std::setfill('0') << server.endpoint().port;
    return text.str();
  }

  Result<std::unique_ptr<ServerSocket>> try_serve(const std::string& endpoint, KeyOrigin origin) {
    return ServerSocket::bind(context_, *authenticator_, Endpoint::parse(endpoint).value(),
                              keys_.ring(Role::kController, origin), {.allowed_roles = {Role::kTrainer}});
  }
};

TEST_F(ServerSocketTest, EveryAllowedRoleIsServedAndKnownByItsKey) {
  const auto server = serve({.allowed_roles = {kRoles.begin(), kRoles.end()}});
  for (const Role role : kRoles) expect_served(*server, role);
}

TEST_F(ServerSocketTest, AnswersGoToTheClientThatAsked) {
  const auto server = serve({.allowed_roles = {Role::kTrainer, Role::kWorker}});
  const auto trainer = connect(*server, Role::kTrainer);
  const auto worker = connect(*server, Role::kWorker);
  expect_connected(*trainer);
  expect_connected(*worker);
  for (int round = 0; round < 20; ++round) {
    ASSERT_TRUE(trainer->send(filled(1, 1)));
    ASSERT_TRUE(worker->send(filled(1, 2)));
    for (int message = 0; message < 2; ++message) {
      const auto received = next_message(*server);
      ASSERT_TRUE(received);
      const bool is_worker = received->peer.identity.role == Role::kWorker;
      EXPECT_EQ(copy_of(received->parts[0]), filled(1, is_worker ? 2 : 1));
      ASSERT_TRUE(server->send(received->peer.routing_id, copy_of(received->parts[0])));
    }
    EXPECT_EQ(copy_of(next_message(*trainer)->parts[0]), filled(1, 1));
    EXPECT_EQ(copy_of(next_message(*worker)->parts[0]), filled(1, 2));
  }
}

TEST_F(ServerSocketTest, MessagesOfSeveralPartsKeepTheirPartsUpToTheCaps) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  const auto client = connect(*server, Role::kTrainer);
  expect_connected(*client);
  const auto payload = filled(wire::kPartBytesMax, 7);
  std::vector<std::vector<std::byte>> contents = {filled(64, 1), {}, payload};
  while (contents.size() < wire::kPartCountMax) contents.push_back(filled(100, static_cast<int>(contents.size())));
  std::vector<OutgoingPart> parts;
  for (const auto& content : contents) parts.push_back({.bytes = content, .release = nullptr});
  ASSERT_TRUE(client->send(parts));
  const auto received = next_message(*server);
  ASSERT_TRUE(received);
  ASSERT_EQ(received->parts.size(), wire::kPartCountMax);
  for (size_t index = 0; index < wire::kPartCountMax; ++index)
    EXPECT_EQ(copy_of(received->parts[index]), contents[index]);
  ASSERT_TRUE(server->send(received->peer.routing_id, parts));
  const auto answer = next_message(*client);
  ASSERT_TRUE(answer);
  ASSERT_EQ(answer->parts.size(), wire::kPartCountMax);
  EXPECT_EQ(copy_of(answer->parts[2]), payload);
}

TEST_F(ServerSocketTest, WhatIsAboveACapIsRefusedBeforeItIsSent) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  const auto client = connect(*server, Role::kTrainer);
  expect_connected(*client);
  const auto too_large = filled(wire::kPartBytesMax + 1, 7);
  EXPECT_EQ(client->send(too_large).error().code, Errc::kTooLarge);
  const std::span<const std::byte> whole_part = std::span(too_large).first(wire::kPartBytesMax);
  std::vector<OutgoingPart> parts = {{.bytes = whole_part, .release = nullptr},
                                     {.bytes = whole_part, .release = nullptr}};
  EXPECT_EQ(client->send(parts).error().code, Errc::kTooLarge);
  parts.assign(wire::kPartCountMax + 1, {});
  EXPECT_EQ(client->send(parts).error().code, Errc::kTooLarge);
  ASSERT_TRUE(client->send(filled(1, 1)));
  EXPECT_EQ(copy_of(next_message(*server)->parts[0]), filled(1, 1));
}

TEST_F(ServerSocketTest, ServersOfOneProcessHaveAllowListsOfTheirOwn) {
  const auto for_trainers = serve({.allowed_roles = {Role::kTrainer}});
  const auto for_workers = serve({.allowed_roles = {Role::kWorker}});
  expect_refused(*connect(*for_trainers, Role::kWorker), "does not accept this key");
  expect_refused(*connect(*for_workers, Role::kTrainer), "does not accept this key");
  expect_served(*for_trainers, Role::kTrainer);
  expect_served(*for_workers, Role::kWorker);
  EXPECT_EQ(authenticator_->refused_count(), 2u);
}

// While messages flowed, a sender was told that there is no room long after the peer had taken them all: one run in
// fifty on a busy machine.
TEST_F(ServerSocketTest, ManyMessagesAreNeitherLostNorReordered) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  const auto client = connect(*server, Role::kTrainer);
  expect_connected(*client);
  constexpr int kMessageCount = 5000;
  int sent_count = 0;
  int received_count = 0;
  while (received_count < kMessageCount) {
    while (sent_count < kMessageCount && client->send(std::as_bytes(std::span(&sent_count, 1)))) ++sent_count;
    ASSERT_GT(sent_count, received_count) << "there is room, as all that was sent has been received";
    const auto received = next_message(*server);
    ASSERT_TRUE(received);
    int number = -1;
    std::memcpy(&number, received->parts[0].bytes().data(), sizeof number);
    ASSERT_EQ(number, received_count++);
  }
  EXPECT_FALSE(has_message(*server));
}

TEST_F(ServerSocketTest, AClientThatIsGoneIsClosedAndOneThatComesBackIsAnotherPeer) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  auto client = connect(*server, Role::kTrainer);
  ASSERT_TRUE(wait_and_send(*client, filled(1, 1)));
  const auto first = next_message(*server);
  ASSERT_TRUE(first);
  client.reset();
  const auto deadline = Clock::now() + kPatience;
  Errc code = Errc::kFailed;
  while (Clock::now() < deadline) {
    if (const auto sent = server->send(first->peer.routing_id, filled(1, 2)); !sent) {
      code = sent.error().code;
      break;
    }
  }
  EXPECT_EQ(code, Errc::kClosed);
  client = connect(*server, Role::kTrainer);
  ASSERT_TRUE(wait_and_send(*client, filled(1, 3)));
  const auto second = next_message(*server);
  ASSERT_TRUE(second);
  EXPECT_NE(second->peer.routing_id, first->peer.routing_id);
  EXPECT_EQ(second->peer.identity, first->peer.identity);
}

TEST_F(ServerSocketTest, TheEndpointIsTheOneThatIsReallyBound) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  EXPECT_EQ(server->endpoint().host, "127.0.0.1");
  EXPECT_NE(server->endpoint().port, 0);
  EXPECT_EQ(listening_addresses(), std::set<std::string>{"0100007F:" + port_text(*server)});
  const auto by_name = serve({.allowed_roles = {Role::kTrainer}}, Role::kController, "tcp://localhost:0");
  EXPECT_EQ(by_name->endpoint().host, "127.0.0.1");
  EXPECT_TRUE(listening_addresses().contains("0100007F:" + port_text(*by_name)));
  EXPECT_EQ(listening_addresses().size(), 2u);
}

TEST_F(ServerSocketTest, IPv6LoopbackIsServed) {
  auto bound = try_serve("tcp://[::1]:0", KeyOrigin::kShared);
  if (!bound) GTEST_SKIP() << "no IPv6 here: " << bound.error().message;
  const auto server = std::move(bound).value();
  EXPECT_EQ(listening_addresses(), std::set<std::string>{"00000000000000000000000001000000:" + port_text(*server)});
  expect_served(*server);
}

TEST_F(ServerSocketTest, AddressesThatOthersCanReachNeedKeysThatWereGiven) {
  const auto sockets = own_sockets();
  for (const auto* endpoint : {"tcp://*:0", "tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://0:0", "tcp://10.1.2.3:0"}) {
    const auto refused = try_serve(endpoint, KeyOrigin::kShared);
    ASSERT_FALSE(refused) << endpoint;
    EXPECT_EQ(refused.error().code, Errc::kUnsupported);
    EXPECT_NE(refused.error().message.find("penstock keys"), std::string::npos) << refused.error().message;
    EXPECT_EQ(own_sockets(), sockets) << endpoint;
  }
  const auto server = try_serve("tcp://*:0", KeyOrigin::kGiven);
  ASSERT_TRUE(server) << server.error().message;
  EXPECT_EQ(listening_addresses(), std::set<std::string>{"00000000:" + port_text(*server.value())});
}

TEST_F(ServerSocketTest, ListeningWhereSomebodyListensIsAnError) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  const auto second = try_serve(server->endpoint().text(), KeyOrigin::kShared);
  ASSERT_FALSE(second);
  EXPECT_NE(second.error().message.find(server->endpoint().text()), std::string::npos) << second.error().message;
}

TEST_F(ServerSocketTest, AnUnknownRoutingIdIsClosed) {
  const auto server = serve({.allowed_roles = {Role::kTrainer}});
  EXPECT_EQ(server->send("nobody", filled(1, 1)).error().code, Errc::kClosed);
}

class ServerOfAKeyFolder : public PoolSocketsTest {
 protected:
  ServerOfAKeyFolder() {
    EXPECT_TRUE(make_key_folder(folder_));
    EXPECT_TRUE(make_user_keys(folder_, "ann", temp_ / "of-ann"));
    server_ =
        ServerSocket::bind(context_, *authenticator_, {.host = "127.0.0.1", .port = 0},
                           load_key_folder(folder_, Role::kController).value(), {.allowed_roles = {Role::kTrainer}})
            .value();
  }
  std::unique_ptr<ClientSocket> join(const std::string& folder) {
    const auto keys = load_key_folder(folder, Role::kTrainer).value();
    return connect(server_->endpoint(), keys.own(), keys.controller_key());
  }
  // Sends until a message has come that is as wanted.
  ServerReceipt receive_from(ClientSocket& client, const std::function<bool(const ServerReceipt&)>& is_wanted) {
    const auto deadline = Clock::now() + kPatience;
    ServerReceipt receipt;
    while (Clock::now() < deadline) {
      EXPECT_TRUE(client.send(filled(1, 1)));
      const auto received = next_message(*server_);
      if (received && is_wanted(*received)) return {.peer = received->peer, .parts = {}, .offence = received->offence};
    }
    ADD_FAILURE() << "no such message came";
    return receipt;
  }

  const test::TempFolder temp_;
  const std::string folder_ = temp_ / "keys";
  std::unique_ptr<ServerSocket> server_;
};

// A user whose key was deleted was served until each process of the pool had been started again.
TEST_F(ServerOfAKeyFolder, RemovedKeyIsLetInNoMoreAlsoOverAConnectionThatIsThere) {
  const auto ann = join(temp_ / "of-ann");
  expect_connected(*ann);
  EXPECT_EQ(receive_from(*ann, [](const auto& receipt) { return receipt.parts.size() == 1; }).peer.user, "ann");
  ASSERT_EQ(::unlink((folder_ + "/ann.user.public").c_str()), 0);
  const auto dropped = receive_from(*ann, [](const auto& receipt) { return receipt.parts.empty(); });
  EXPECT_EQ(dropped.offence, "its key is no longer accepted");
  EXPECT_EQ(dropped.peer.user, "");
  const auto again = join(temp_ / "of-ann");
  expect_refused(*again, "does not accept this key");
  const auto role = join(folder_);
  expect_connected(*role);
  EXPECT_EQ(receive_from(*role, [](const auto& receipt) { return receipt.parts.size() == 1; }).peer.user, "");
  const auto notices = server_->take_notices();
  ASSERT_EQ(notices.size(), 1u);
  EXPECT_NE(notices[0].find("no longer accepted: the keys of ann"), std::string::npos) << notices[0];
}

// To replace the keys of a pool, all of it had to be stopped.
TEST_F(ServerOfAKeyFolder, FormerKeyOfARoleIsLetInUntilItsRotationIsFinished) {
  const auto old = join(folder_);
  expect_connected(*old);
  const PublicKey old_key = load_key_folder(folder_, Role::kTrainer).value().own().public_key();
  const auto rotated = rotate_keys(folder_);
  ASSERT_TRUE(rotated) << rotated.error().message;
  const KeyRing keys = load_key_folder(folder_, Role::kTrainer).value();
  std::unique_ptr<ClientSocket> renewed;
  std::optional<ConnectionEvent> event;
  const auto deadline = Clock::now() + kPatience;
  do {  // until the server has looked at its folder; it has the former key itself
    renewed = ClientSocket::connect(context_, *resolver_, server_->endpoint(), keys, Role::kController).value();
    event = next_event(*renewed);
    ASSERT_TRUE(event);
  } while (event->kind != ConnectionEvent::Kind::kConnected && Clock::now() < deadline);
  const auto is_served = [](const PublicKey& key) {
    return [key](const ServerReceipt& receipt) {
      return receipt.parts.size() == 1 && receipt.peer.identity == PeerIdentity{.role = Role::kTrainer, .key = key};
    };
  };
  receive_from(*renewed, is_served(keys.own().public_key()));
  receive_from(*old, is_served(old_key));
  ASSERT_TRUE(finish_rotation(folder_));
  const auto dropped = receive_from(*old, [](const auto& receipt) { return receipt.parts.empty(); });
  EXPECT_EQ(dropped.offence, "its key is no longer accepted");
  EXPECT_EQ(dropped.peer.identity.key, old_key);
  receive_from(*renewed, is_served(keys.own().public_key()));
}

TEST_F(ServerOfAKeyFolder, MachineIsKnownByItsNameAndOutOnceItsKeyIsRemoved) {
  ASSERT_TRUE(make_machine_keys(folder_, "beta", temp_ / "of-beta"));
  server_ = ServerSocket::bind(context_, *authenticator_, {.host = "127.0.0.1", .port = 0},
                               load_key_folder(folder_, Role::kController).value(), {.allowed_roles = {Role::kWorker}})
                .value();
  const auto keys = load_key_folder(temp_ / "of-beta", Role::kWorker).value();
  const auto beta = connect(server_->endpoint(), keys.own(), keys.controller_key());
  expect_connected(*beta);
  const auto received = receive_from(*beta, [](const auto& receipt) { return receipt.parts.size() == 1; });
  EXPECT_EQ(received.peer.machine, "beta");
  EXPECT_EQ(received.peer.user, "");
  EXPECT_EQ(received.peer.identity, (PeerIdentity{.role = Role::kWorker, .key = keys.own().public_key()}));
  ASSERT_EQ(::unlink((folder_ + "/beta.machine.public").c_str()), 0);
  const auto dropped = receive_from(*beta, [](const auto& receipt) { return receipt.parts.empty(); });
  EXPECT_EQ(dropped.offence, "its key is no longer accepted");
  const auto again = connect(server_->endpoint(), keys.own(), keys.controller_key());
  expect_refused(*again, "does not accept this key");
}

TEST_F(ServerOfAKeyFolder, KeyThatIsAddedIsLetInWithoutAStart) {
  ASSERT_TRUE(make_user_keys(folder_, "ben", temp_ / "of-ben"));
  const auto deadline = Clock::now() + kPatience;
  std::optional<ConnectionEvent> event;
  std::unique_ptr<ClientSocket> ben;
  do {
    ben = join(temp_ / "of-ben");
    event = next_event(*ben);
    ASSERT_TRUE(event);
  } while (event->kind != ConnectionEvent::Kind::kConnected && Clock::now() < deadline);
  EXPECT_EQ(receive_from(*ben, [](const auto& receipt) { return receipt.parts.size() == 1; }).peer.user, "ben");
}

TEST_F(ServerOfAKeyFolder, KeysThatCannotBeReadAgainStayAndTheTroubleIsTold) {
  ASSERT_EQ(::chmod(folder_.c_str(), 0755), 0);
  const auto deadline = Clock::now() + kPatience;
  while (server_->key_trouble().empty() && Clock::now() < deadline) std::this_thread::yield();
  EXPECT_NE(server_->key_trouble().find("0755"), std::string::npos) << server_->key_trouble();
  const auto ann = join(temp_ / "of-ann");
  expect_connected(*ann);
  ASSERT_EQ(::chmod(folder_.c_str(), 0700), 0);
  while (!server_->key_trouble().empty() && Clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(server_->key_trouble(), "");
  const auto notices = server_->take_notices();
  ASSERT_EQ(notices.size(), 1u) << "it is told once";
  EXPECT_TRUE(notices[0].starts_with("cannot reload its keys, and continues with the current ones: ")) << notices[0];
}

}  // namespace
}  // namespace penstock::net
