// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's connection to one worker of a pool, with the batches whose pieces are on their way over it.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/instant.h"
#include "base/live_clock.h"
#include "base/result.h"
#include "loader/incoming_batch.h"
#include "net/client_socket.h"
#include "net/endpoint.h"
#include "net/key_ring.h"
#include "wire/batch_key.h"
#include "wire/blob_record.h"
#include "wire/pool_record.h"

namespace penstock::loader {

// Confined to the I/O thread.
class WorkerLink {
 public:
  // `tag` is that of its socket in the set that waits for it.
  WorkerLink(net::Endpoint endpoint, std::unique_ptr<net::ClientSocket> socket, uint64_t tag)
      : endpoint_(std::move(endpoint)), socket_(std::move(socket)), tag_(tag), opened_at_(clock_now()) {}

  const net::Endpoint& endpoint() const { return endpoint_; }
  net::ClientSocket& socket() { return *socket_; }
  uint64_t tag() const { return tag_; }
  Instant opened_at() const { return opened_at_; }

  // The time at which it must be served though nothing has come.
  std::optional<Instant> due_at() const { return earlier(reconnect_at, socket_->due_at()); }

  // Copies a piece of a batch to where the others are. False if one that comes before it did not.
  [[nodiscard]] bool take_piece(const wire::PoolAnswer& answer, std::span<const std::byte> piece, BatchMemory& memory);
  // The batch of which the last piece has come. Nothing if others did not.
  std::optional<IncomingBatch> take_whole(wire::BatchKey key);
  // Pieces of batches that were not answered are not needed any more.
  void forget_pieces() { incoming_.clear(); }

  // Sends a piece of a blob, or says that there is none. A piece that does not get through is asked for again.
  void hand_out(const wire::BlobWish& wish, const std::shared_ptr<const std::string>& blob);

  // libzmq has given up; another try is due then.
  std::optional<Instant> reconnect_at;
  bool is_trouble_told = false;  // the user has been told the reason
  bool has_spoken = false;       // the worker has, over this connection or one before it

 private:
  const net::Endpoint endpoint_;
  std::unique_ptr<net::ClientSocket> socket_;
  const uint64_t tag_;
  const Instant opened_at_;
  uint32_t number_ = 0;  // of the link that the pieces are of
  std::map<wire::BatchKey, IncomingBatch> incoming_;
};

}  // namespace penstock::loader
