// SPDX-License-Identifier: Apache-2.0
#pragma once
// The trainer's end of the connection on which the pieces of one link's batches cross. It connects once: when the
// connection ends, the link has ended too, and the next one has another client, with other keys.

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

// Confined to the thread that made it.
class DataClient {
 public:
  // Begins to connect to the data port of the link that `name` names, whose keys follow from the trainer's `offer` and
  // the worker's `grant`. kMalformed when the grant names no endpoint. `resolver` outlives the client.
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
    kFault,  // a message that is not the link's next one, as the worker sealed it; `fault()` says more
  };
  // The head of the next piece, of which only the order is checked, and which is not known to be true before open().
  Outcome try_receive();
  const wire::SealedPiece& piece() const { return piece_; }
  // Opens the piece into `room`, which is as long. False if it is not as the worker sealed it; what lies in `room` then
  // means nothing.
  [[nodiscard]] bool open(std::span<std::byte> room);
  const std::string& fault() const { return fault_; }

  // As ClientSocket::try_event. Once it is connected it has joined the link.
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
