// SPDX-License-Identifier: Apache-2.0
#pragma once
// The trainer's end of the connection that carries the pieces of one link's batches. It connects once: if the
// connection ends, the link has ended too, and the next link has a new client with new keys.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "base/instant.h"
#include "base/result.h"
#include "net/client_socket.h"
#include "net/endpoint.h"
#include "net/resolver.h"
#include "net/seal.h"
#include "wire/piece_record.h"

namespace penstock::net {

// Confined to the thread that created it.
class DataClient {
 public:
  // Starts to connect to the data port of the link `name`, whose keys are derived from the trainer's `offer` and the
  // worker's `grant`. kMalformed if the grant contains no endpoint. `resolver` must outlive the client.
  static Result<std::unique_ptr<DataClient>> connect(SocketContext& context, Resolver& resolver, const LinkName& name,
                                                     const wire::SealOffer& offer, const wire::SealGrant& grant);

  // For `connect`.
  DataClient(std::unique_ptr<ClientSocket> socket, Sealer sealer, Opener opener, const LinkName& name)
      : socket_(std::move(socket)), sealer_(std::move(sealer)), opener_(std::move(opener)), name_(name) {}

  const Endpoint& endpoint() const { return socket_->endpoint(); }
  const std::string& lookup_failure() const { return socket_->lookup_failure(); }

  enum class Outcome : uint8_t {
    kNothing,  // no message is waiting
    kPiece,
    kFault,  // a message that is not the link's next one as sealed by the worker; see `fault()`
  };
  // Receives the head of the next piece, of which only the order is checked; it is not authenticated before open().
  Outcome try_receive();
  const wire::SealedPiece& piece() const { return piece_; }
  // Decrypts the piece into `room`, which has the same length. Returns false if it is not as the worker sealed it; the
  // contents of `room` are then meaningless.
  [[nodiscard]] bool open(std::span<std::byte> room);
  const std::string& fault() const { return fault_; }

  // As ClientSocket::try_event. Joins the link once it is connected.
  std::optional<ConnectionEvent> try_event();
  std::optional<Instant> due_at() const { return socket_->due_at(); }
  std::array<Waitable, 2> waitables() const { return socket_->waitables(); }

 private:
  Outcome fail(std::string fault);
  void join();

  std::unique_ptr<ClientSocket> socket_;
  Sealer sealer_;
  Opener opener_;
  const LinkName name_;
  uint64_t counter_ = 0;  // of the last piece
  bool has_joined_ = false;
  ClientReceipt receipt_;
  wire::SealedPiece piece_;
  std::string fault_;
};

}  // namespace penstock::net
