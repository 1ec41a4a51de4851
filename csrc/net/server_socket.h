// SPDX-License-Identifier: Apache-2.0
#pragma once
// The listening side of a pool's connections: ServerSocket, for messages, and DataServer, for the pieces of batches.

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/result.h"
#include "net/authenticator.h"
#include "net/endpoint.h"
#include "net/keys.h"
#include "net/seal.h"
#include "net/socket.h"
#include "net/tcp_socket.h"
#include "wire/pool_record.h"

namespace penstock::net {

constexpr std::chrono::milliseconds kHandshakeInterval{5000};

struct ServerSocketOptions {
  std::vector<Role> allowed_roles;
  wire::MessageLimits limits = {};
  // A connection that has not shown an allowed key by then is closed.
  std::chrono::milliseconds handshake_interval = kHandshakeInterval;
  // The number of servers of this kind in this process, including this one, which share the room for connections.
  size_t sharer_count = 1;
  // The room for connections that have shown an allowed key.
  HolderRoom room = {};
};

// A connected client. The routing id belongs to this connection: a client that reconnects gets another.
struct Peer {
  std::string routing_id;
  PeerIdentity identity;
  // The name of the key's holder; both empty for a role's key.
  std::string user{};     // of a trainer
  std::string machine{};  // of a worker
  std::string address{};  // numeric, without the port
};

struct ServerReceipt {
  Peer peer;
  std::vector<ReceivedPart> parts;
  // Set, and without parts, if a peer broke a rule, which it describes, or if its key is no longer admitted.
  std::string offence;
};

// A controller's socket, for all roles, and a worker's, for trainers. Only keys of the allowed roles pass the
// handshake, and every message has its sender's identity, according to the key. Confined to the thread that created it.
class ServerSocket {
 public:
  // Listens on `endpoint` with the keys of `keys`; the public ones are reread when their folder changes. An address
  // that other machines can reach is refused, before any port is opened, unless the keys were given. Can block during a
  // name lookup.
  static Result<std::unique_ptr<ServerSocket>> bind(SocketContext& context, Authenticator& authenticator,
                                                    const Endpoint& endpoint, const KeyRing& keys,
                                                    const ServerSocketOptions& options);

  // For `bind`.
  ServerSocket(std::unique_ptr<Authenticator::Domain> domain, std::unique_ptr<TcpSocket> socket, Endpoint endpoint)
      : domain_(std::move(domain)), socket_(std::move(socket)), endpoint_(std::move(endpoint)) {}
  ServerSocket(const ServerSocket&) = delete;
  ServerSocket& operator=(const ServerSocket&) = delete;

  // The address and port that are actually bound.
  const Endpoint& endpoint() const { return endpoint_; }

  // As TcpSocket::send. kClosed if the peer is gone, or reads so slowly that there is no room.
  Result<void> send(std::string_view routing_id, std::span<OutgoingPart> parts) {
    return socket_->send(routing_id, parts);
  }
  Result<void> send(std::string_view routing_id, std::span<const std::byte> only_part);

  // Receives into `receipt`, dropping its former content. Returns false if no message is waiting.
  Result<bool> try_receive(ServerReceipt& receipt);

  // Key changes to report to operators, once each; and why the keys cannot be reread, empty if they can.
  std::vector<std::string> take_notices() { return domain_->take_notices(); }
  std::string key_trouble() const { return domain_->trouble(); }

  Waitable waitable() const { return socket_->waitable(); }

 private:
  std::unique_ptr<Authenticator::Domain> domain_;
  std::unique_ptr<TcpSocket> socket_;
  const Endpoint endpoint_;
  ReceivedMessage message_;
};

// The worker's end of the connections that carry the pieces of batches: a separate port without CURVE, whose pieces are
// sealed with the keys of the current link. Connections without a ticket of that link are closed during the handshake,
// and a client that cannot seal its first message with the link's key receives no pieces. Confined to the thread that
// created it.
class DataServer {
 public:
  struct Options {
    KeyOrigin origin = KeyOrigin::kGiven;
    uint64_t worker_id = 0;
    uint8_t ciphers = fast_ciphers();
    size_t sharer_count = 1;  // as ServerSocketOptions
  };
  // Listens on `endpoint`. `on_room` is called, on any thread, when has_room() may have become true.
  static Result<std::unique_ptr<DataServer>> bind(SocketContext& context, Authenticator& authenticator,
                                                  const Endpoint& endpoint, const Options& options,
                                                  std::function<void()> on_room);

  // For `bind`.
  DataServer(std::unique_ptr<Authenticator::Domain> domain, std::unique_ptr<TcpSocket> socket, Endpoint endpoint,
             const Options& options, std::function<void()> on_room)
      : domain_(std::move(domain)),
        socket_(std::move(socket)),
        endpoint_(std::move(endpoint)),
        options_(options),
        buffers_(std::make_shared<SealedBuffers>(std::move(on_room))) {}
  DataServer(const DataServer&) = delete;
  DataServer& operator=(const DataServer&) = delete;

  // The address and port that are actually bound.
  const Endpoint& endpoint() const { return endpoint_; }

  // Starts a link that replaces the previous one, and returns the data that the trainer needs for it, except the
  // endpoint.
  Result<wire::SealGrant> begin(uint64_t trainer_id, uint32_t link, const wire::SealOffer& offer);
  // Ends the link, if there is one.
  void end();

  // Processes received messages: admits the trainer if it joins, and ignores all others.
  Result<void> receive();

  // Whether the trainer has joined and another piece may be sent.
  bool has_room() const { return !routing_id_.empty() && buffers_->has_room(); }
  // Sends a piece of a batch of the link, at most kPieceBytesMax long; `head` defines its place. Requires has_room().
  // kClosed if the trainer is gone, or the key is exhausted: another link is needed.
  Result<void> send(wire::PieceHead head, std::span<const std::byte> piece);

  Waitable waitable() const { return socket_->waitable(); }

 private:
  struct Session {
    uint64_t trainer_id;
    uint32_t link;
    Sealer sealer;
    Opener opener;
    uint64_t counter = 0;
  };

  bool joins(const ReceivedMessage& message);

  std::unique_ptr<Authenticator::Domain> domain_;
  std::unique_ptr<TcpSocket> socket_;
  const Endpoint endpoint_;
  const Options options_;
  std::shared_ptr<SealedBuffers> buffers_;  // shared with the pieces that ZeroMQ is sending
  std::optional<Session> session_;
  std::string routing_id_;  // of the trainer's connection; empty until it joins
  ReceivedMessage message_;
};

}  // namespace penstock::net
