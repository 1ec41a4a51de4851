// SPDX-License-Identifier: Apache-2.0
#pragma once
// The listening side of a pool's connections: a controller's, for everybody, and a worker's, for trainers. Only keys of
// the allowed roles get through the handshake, and every message comes with who sent it, as the key says.

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"
#include "net/authenticator.h"
#include "net/endpoint.h"
#include "net/key_ring.h"
#include "net/tcp_socket.h"

namespace penstock::net {

constexpr std::chrono::milliseconds kHandshakeInterval{5000};

struct ServerSocketOptions {
  std::vector<Role> allowed_roles;
  wire::MessageLimits limits = {};
  // A connection that has not shown an allowed key by then is closed.
  std::chrono::milliseconds handshake_interval = kHandshakeInterval;
  // How many in this process, this one included, have such a server, and share the room for connections.
  size_t sharer_count = 1;
  // For connections that have.
  HolderRoom room = {};
};

// A connected client. The routing id is of this one connection: a client that connects again gets another.
struct Peer {
  std::string routing_id;
  PeerIdentity identity;
  // Whose key it is; both empty for the key of a role.
  std::string user{};     // of a trainer
  std::string machine{};  // of a worker
  std::string address{};  // a number, without the port
};

struct ServerReceipt {
  Peer peer;
  std::vector<ReceivedPart> parts;
  // Set when a peer broke a rule, and names it, or when its key is let in no more. There are no parts then.
  std::string offence;
};

// Confined to the thread that made it.
class ServerSocket {
 public:
  // Listens at `endpoint` with the keys of `keys`; the public ones are read again when their folder changes. An address
  // that other machines can reach is refused unless the keys were given, before any port is opened. Can block while a
  // name is looked up.
  static Result<std::unique_ptr<ServerSocket>> bind(SocketContext& context, Authenticator& authenticator,
                                                    const Endpoint& endpoint, const KeyRing& keys,
                                                    const ServerSocketOptions& options);

  // For `bind`.
  ServerSocket(std::unique_ptr<Authenticator::Domain> domain, std::unique_ptr<TcpSocket> socket, Endpoint endpoint)
      : domain_(std::move(domain)), socket_(std::move(socket)), endpoint_(std::move(endpoint)) {}
  ServerSocket(const ServerSocket&) = delete;
  ServerSocket& operator=(const ServerSocket&) = delete;

  // The address and port that are really bound.
  const Endpoint& endpoint() const { return endpoint_; }

  // As TcpSocket::send. kClosed: the peer is gone, or reads so slowly that there is no room.
  Result<void> send(std::string_view routing_id, std::span<OutgoingPart> parts) {
    return socket_->send(routing_id, parts);
  }
  Result<void> send(std::string_view routing_id, std::span<const std::byte> only_part);

  // Receives into `receipt`, dropping its former content. Returns false when no message is waiting.
  Result<bool> try_receive(ServerReceipt& receipt);

  // News of the keys, for operators, once each; and why they cannot be read again, empty where they can.
  std::vector<std::string> take_notices() { return domain_->take_notices(); }
  std::string key_trouble() const { return domain_->trouble(); }

  Waitable waitable() const { return socket_->waitable(); }

 private:
  std::unique_ptr<Authenticator::Domain> domain_;
  std::unique_ptr<TcpSocket> socket_;
  const Endpoint endpoint_;
  ReceivedMessage message_;
};

}  // namespace penstock::net
