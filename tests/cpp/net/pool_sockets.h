// SPDX-License-Identifier: Apache-2.0
#pragma once
// Servers and clients of a pool on loopback, with the keys of one pool and the waits of the tests.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <fstream>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/file_descriptor.h"
#include "net/authenticator.h"
#include "net/client_socket.h"
#include "net/server_socket.h"

namespace penstock::net {

// The key pairs of one pool.
class PoolKeys {
 public:
  const KeyPair& pair(Role role) const { return pairs_[static_cast<size_t>(role)]; }
  const PublicKey& public_key(Role role) const { return pair(role).public_key(); }

  KeyRing ring(Role own_role, KeyOrigin origin = KeyOrigin::kGiven, KeyNames users = {}, KeyNames machines = {}) const {
    PublicKeys keys{.users = std::move(users), .machines = std::move(machines)};
    for (const Role role : kRoles) keys.roles[static_cast<size_t>(role)] = public_key(role);
    return {own_role, copy_of(pair(own_role)), std::move(keys), origin};
  }
  static KeyPair copy_of(const KeyPair& pair) { return KeyPair::parse_secret(pair.secret_text().text()).value(); }

 private:
  std::array<KeyPair, kRoles.size()> pairs_ = {KeyPair::generate(), KeyPair::generate(), KeyPair::generate(),
                                               KeyPair::generate()};
};

// The sockets of one test, or of one of many cases of it.
class PoolSockets {
 protected:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::seconds kPatience{30};

  std::unique_ptr<ServerSocket> serve(const ServerSocketOptions& options, Role own_role = Role::kController,
                                      const std::string& endpoint = "tcp://127.0.0.1:0") {
    auto server =
        ServerSocket::bind(context_, *authenticator_, Endpoint::parse(endpoint).value(), keys_.ring(own_role), options);
    EXPECT_TRUE(server) << server.error().message;
    return server ? std::move(server).value() : nullptr;
  }

  // An address at which nobody listens, since the system gave out its port a moment ago.
  static Endpoint free_endpoint() {
    const FileDescriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t length = sizeof address;
    EXPECT_EQ(::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
    EXPECT_EQ(::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
    return {.host = "127.0.0.1", .port = ntohs(address.sin_port)};
  }

  // A server for trainers at an address where one was a moment ago: libzmq closes sockets in the background.
  std::unique_ptr<ServerSocket> serve_again(const Endpoint& endpoint) {
    const auto deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline) {
      auto server = ServerSocket::bind(context_, *authenticator_, endpoint, keys_.ring(Role::kController),
                                       {.allowed_roles = {Role::kTrainer}});
      if (server) return std::move(server).value();
    }
    return nullptr;
  }

  std::unique_ptr<ClientSocket> connect(const Endpoint& endpoint, const KeyPair& own, const PublicKey& server_key,
                                        const ClientSocketOptions& options = {}) {
    auto client = ClientSocket::connect(context_, *resolver_, endpoint, own, server_key, options);
    EXPECT_TRUE(client) << client.error().message;
    return client ? std::move(client).value() : nullptr;
  }
  std::unique_ptr<ClientSocket> connect(const ServerSocket& server, Role role,
                                        const ClientSocketOptions& options = {}) {
    return connect(server.endpoint(), keys_.pair(role), keys_.public_key(Role::kController), options);
  }

  // The next event of a client.
  static std::optional<ConnectionEvent> next_event(ClientSocket& client) {
    const auto deadline = Clock::now() + kPatience;
    while (Clock::now() < deadline) {
      if (auto event = client.try_event()) return event;
      const Waitable waitables[] = {client.waitables()[1]};
      static_cast<void>(wait_readable(waitables, {}, {}, std::chrono::seconds(1)));
    }
    return std::nullopt;
  }
  static void expect_connected(ClientSocket& client) {
    const auto event = next_event(client);
    ASSERT_TRUE(event);
    ASSERT_EQ(event->kind, ConnectionEvent::Kind::kConnected) << event->reason;
  }
  static void expect_refused(ClientSocket& client, const std::string& word) {
    const auto event = next_event(client);
    ASSERT_TRUE(event);
    ASSERT_EQ(event->kind, ConnectionEvent::Kind::kRefused);
    EXPECT_NE(event->reason.find(word), std::string::npos) << event->reason;
    EXPECT_NE(event->reason.find(client.endpoint().text()), std::string::npos) << event->reason;
  }

  // Sends once the server is connected.
  static Result<void> wait_and_send(ClientSocket& client, std::span<const std::byte> bytes) {
    expect_connected(client);
    return client.send(bytes);
  }

  // The next message of a server.
  static std::optional<ServerReceipt> next_message(ServerSocket& server) {
    const auto deadline = Clock::now() + kPatience;
    ServerReceipt receipt;
    while (Clock::now() < deadline) {
      const auto received = server.try_receive(receipt);
      EXPECT_TRUE(received) << received.error().message;
      if (!received) return std::nullopt;
      if (received.value()) return receipt;
      const Waitable waitables[] = {server.waitable()};
      static_cast<void>(wait_readable(waitables, {}, {}, std::chrono::seconds(1)));
    }
    return std::nullopt;
  }
  static std::optional<ClientReceipt> next_message(ClientSocket& client) {
    const auto deadline = Clock::now() + kPatience;
    ClientReceipt receipt;
    while (Clock::now() < deadline) {
      const auto received = client.try_receive(receipt);
      EXPECT_TRUE(received) << received.error().message;
      if (!received) return std::nullopt;
      if (received.value()) return receipt;
      const Waitable waitables[] = {client.waitables()[0]};
      static_cast<void>(wait_readable(waitables, {}, {}, std::chrono::seconds(1)));
    }
    return std::nullopt;
  }

  static bool has_message(ServerSocket& server) {
    ServerReceipt receipt;
    return server.try_receive(receipt).value();
  }

  static std::vector<std::byte> filled(size_t size, int value) { return {size, static_cast<std::byte>(value)}; }
  static std::vector<std::byte> copy_of(const ReceivedPart& part) { return {part.bytes().begin(), part.bytes().end()}; }

  // That a client who may connect is, and gets a message there and one back.
  void expect_served(ServerSocket& server, Role role = Role::kTrainer) {
    const auto client = connect(server, role);
    expect_connected(*client);
    const auto question = filled(1000, 5);
    ASSERT_TRUE(client->send(question));
    const auto received = next_message(server);
    ASSERT_TRUE(received);
    EXPECT_EQ(received->peer.identity, (PeerIdentity{.role = role, .key = keys_.public_key(role)}));
    ASSERT_EQ(received->parts.size(), 1u);
    EXPECT_EQ(copy_of(received->parts[0]), question);
    const auto reply = filled(10, 6);
    ASSERT_TRUE(server.send(received->peer.routing_id, reply));
    const auto answer = next_message(*client);
    ASSERT_TRUE(answer);
    ASSERT_EQ(answer->parts.size(), 1u);
    EXPECT_EQ(copy_of(answer->parts[0]), reply);
  }

  // Memory of this process in bytes: `index` 0 is its address space, 1 its resident part.
  static uint64_t memory_bytes(int index) {
    std::ifstream file("/proc/self/statm");
    std::array<uint64_t, 2> pages{};
    file >> pages[0] >> pages[1];
    return pages[static_cast<size_t>(index)] * 4096;
  }
  static uint64_t addressed_bytes() { return memory_bytes(0); }
  static uint64_t resident_bytes() { return memory_bytes(1); }

  // Ends ZeroMQ. Every socket is closed by then.
  void end() {
    authenticator_.reset();
    own_context_.reset();
  }

  const PoolKeys keys_;
  std::unique_ptr<Resolver> resolver_ = Resolver::open().value();
  std::unique_ptr<SocketContext> own_context_ = std::make_unique<SocketContext>();
  SocketContext& context_ = *own_context_;
  std::unique_ptr<Authenticator> authenticator_ = Authenticator::start(context_).value();
};

class PoolSocketsTest : public testing::Test, protected PoolSockets {};

}  // namespace penstock::net
