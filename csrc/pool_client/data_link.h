// SPDX-License-Identifier: Apache-2.0
#pragma once
// The batch chunks of one link with a worker: the agreed keys, the connection that carries the chunks, and the batches
// that are assembled from them.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.h"
#include "loader/batch_memory.h"
#include "loader/incoming_batch.h"
#include "net/data_client.h"
#include "net/resolver.h"
#include "net/socket.h"
#include "wire/batch_key.h"
#include "wire/pool_record.h"

namespace penstock::pool_client {

// Confined to the I/O thread.
class DataLink {
 public:
  // For the link that the trainer's hello with this offer starts.
  DataLink(const net::LinkName& name, const wire::SealOffer& offer) : name_(name), offer_(offer) {}

  uint32_t number() const { return name_.link; }

  // Connects once the worker has reported how its chunks are sealed, and where to get them. Call it once.
  Result<void> connect(net::SocketContext& context, net::Resolver& resolver, const wire::SealGrant& grant);
  bool is_granted() const { return client_ != nullptr; }
  net::DataClient& client() { return *client_; }
  const net::Endpoint& endpoint() const { return client_->endpoint(); }
  std::optional<Instant> due_at() const { return client_->due_at(); }

  enum class Outcome : uint8_t {
    kNothing,  // no chunk was waiting
    kPiece,
    kFault,  // the link cannot continue; `fault()` returns the reason
  };
  // Receives the next chunk. `is_awaited` returns whether a batch is still awaited.
  template <typename IsAwaited>
  Outcome take_piece(loader::BatchMemory& memory, const IsAwaited& is_awaited) {
    switch (client_->try_receive()) {
      case net::DataClient::Outcome::kNothing: return Outcome::kNothing;
      case net::DataClient::Outcome::kFault: return fail(client_->fault());
      case net::DataClient::Outcome::kPiece: break;
    }
    return keep_piece(memory, is_awaited(client_->piece().head.key));
  }
  const std::string& fault() const { return fault_; }

  // Call when the batch is no longer awaited.
  void forget(wire::BatchKey key) { incoming_.erase(key); }
  // Whether all chunks of the batch have arrived.
  bool has_whole(wire::BatchKey key) const;
  // Returns the batch, once.
  std::optional<loader::IncomingBatch> take_whole(wire::BatchKey key);

 private:
  Outcome keep_piece(loader::BatchMemory& memory, bool is_awaited);
  Outcome fail(std::string fault);

  const net::LinkName name_;
  wire::SealOffer offer_;  // until the grant
  std::unique_ptr<net::DataClient> client_;
  std::map<wire::BatchKey, loader::IncomingBatch> incoming_;
  std::string fault_;
  std::vector<std::byte> unwanted_;  // decrypted chunks of batches that are no longer awaited
};

}  // namespace penstock::pool_client
