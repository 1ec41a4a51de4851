// SPDX-License-Identifier: Apache-2.0
#pragma once
// The worker's end of the connections that carry the pieces of batches: a separate port without CURVE, whose pieces are
// sealed with the keys of the current link. Connections without a ticket of that link are closed during the handshake,
// and a client that cannot seal its first message with the link's key receives no pieces.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/result.h"
#include "net/authenticator.h"
#include "net/endpoint.h"
#include "net/key_ring.h"
#include "net/readiness.h"
#include "net/seal.h"
#include "net/sealed_buffers.h"
#include "net/tcp_socket.h"
#include "wire/pool_record.h"

namespace penstock::net {

// Confined to the thread that created it.
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
