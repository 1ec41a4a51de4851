// SPDX-License-Identifier: Apache-2.0
#pragma once
// A trainer's connection to one worker of a pool, with the batches whose pieces are on their way over it.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "base/result.h"
#include "cluster/batch_key.h"
#include "cluster/instant.h"
#include "loader/incoming_batch.h"
#include "transport/blob_record.h"
#include "transport/client_socket.h"
#include "transport/endpoint.h"
#include "transport/key_ring.h"
#include "transport/live_clock.h"
#include "transport/pool_record.h"

namespace penstock::loader {

// Confined to the I/O thread.
class WorkerLink {
 public:
  // `tag` is that of its socket in the set that waits for it.
  WorkerLink(transport::Endpoint endpoint, std::unique_ptr<transport::ClientSocket> socket, uint64_t tag)
      : endpoint_(std::move(endpoint)), socket_(std::move(socket)), tag_(tag), opened_at_(transport::clock_now()) {}

  const transport::Endpoint& endpoint() const { return endpoint_; }
  transport::ClientSocket& socket() { return *socket_; }
  uint64_t tag() const { return tag_; }
  cluster::Instant opened_at() const { return opened_at_; }

  // When it is to be served though nothing has come.
  std::optional<cluster::Instant> due_at() const { return cluster::earlier(reconnect_at, socket_->due_at()); }

  // Copies a piece of a batch to where the others are. False if one that comes before it did not.
  [[nodiscard]] bool take_piece(const transport::PoolAnswer& answer, std::span<const std::byte> piece,
                                BatchMemory& memory);
  // The batch of which the last piece has come. Nothing if others did not.
  std::optional<IncomingBatch> take_whole(cluster::BatchKey key);
  // What came in pieces and was not answered is of no use any more.
  void forget_pieces() { incoming_.clear(); }

  // Sends a piece of a blob, or says that there is none. What does not get through is asked for again.
  void hand_out(const transport::BlobWish& wish, const std::shared_ptr<const std::string>& blob);

  // libzmq has given up; another try is due then.
  std::optional<cluster::Instant> reconnect_at;
  bool is_trouble_told = false;  // the user knows what is wrong with it
  bool has_spoken = false;       // the worker has, over this connection or one before it

 private:
  const transport::Endpoint endpoint_;
  std::unique_ptr<transport::ClientSocket> socket_;
  const uint64_t tag_;
  const cluster::Instant opened_at_;
  uint32_t number_ = 0;  // of the link that the pieces are of
  std::map<cluster::BatchKey, IncomingBatch> incoming_;
};

}  // namespace penstock::loader
