// SPDX-License-Identifier: Apache-2.0
#pragma once
// The outgoing queue of a pool worker to its trainer, in order: messages, and separately the chunks of batches, which
// are sent on another connection. A message never waits for chunks; the trainer accepts an answer when its chunks have
// arrived.

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "net/data_server.h"
#include "net/server_socket.h"
#include "server/pool_work.h"
#include "server/slab_handover.h"
#include "wire/data_message.h"
#include "wire/reports.h"

namespace penstock::server {

struct OutgoingMessage {
  std::string routing_id;
  wire::ToTrainer message;
  uint64_t worker_id = 0;
  uint32_t incarnation = 0;
  // Of an answer; shared with the server, which may have to send it again.
  std::shared_ptr<const PoolResult> result = {};
  std::string text = {};                      // reason for refusing a trainer
  std::optional<wire::SealGrant> grant = {};  // of a welcome
};

// Confined to the I/O thread.
class AnswerOutbox {
 public:
  void push(OutgoingMessage message);
  // The rest of this batch is no longer wanted.
  void drop(wire::BatchKey key);
  // Forgets the answers of a link that has ended.
  void clear();
  bool is_empty() const { return messages_.empty() && batches_.empty(); }
  bool has_messages() const { return !messages_.empty(); }

  // Sends as much as may be in transit. Messages for a peer that is gone are dropped: it repeats its requests on its
  // next link. Batches are handed over by `handover`, if there is one and as far as possible. `meter` is this worker's
  // usage so far, and is read if has_messages() is true.
  void pump(net::ServerSocket& socket, net::DataServer& data, SlabHandover* handover, const wire::WorkerMeter& meter);

 private:
  struct Batch {
    wire::BatchKey key{};
    std::shared_ptr<const PoolResult> result;
    uint64_t offset = 0;  // the bytes before it have been sent
  };

  std::deque<OutgoingMessage> messages_;
  std::deque<Batch> batches_;
};

}  // namespace penstock::server
