// SPDX-License-Identifier: Apache-2.0
#pragma once
// What a pool's worker has to say to its trainer, in order: messages, and beside them the pieces of batches, which
// cross on a connection of their own. A message never waits for pieces; the trainer takes an answer when its pieces are
// there.

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
  std::string text = {};                      // why a trainer is refused
  std::optional<wire::SealGrant> grant = {};  // of a welcome
};

// Confined to the I/O thread.
class AnswerOutbox {
 public:
  void push(OutgoingMessage message);
  // Nobody wants the rest of this batch.
  void drop(wire::BatchKey key);
  // Forgets the answers of a link that has ended.
  void clear();
  bool is_empty() const { return messages_.empty() && batches_.empty(); }
  bool has_messages() const { return !messages_.empty(); }

  // Sends as much as may be on its way. What is for a peer that is gone is dropped: it asks again on its next link.
  // Batches are handed over by `handover` where there is one, and as far as it can. `meter` is what this worker has
  // used by now, and is read where has_messages() is true.
  void pump(net::ServerSocket& socket, net::DataServer& data, SlabHandover* handover, const wire::WorkerMeter& meter);

 private:
  struct Batch {
    wire::BatchKey key{};
    std::shared_ptr<const PoolResult> result;
    uint64_t offset = 0;  // what is before it has been sent
  };

  std::deque<OutgoingMessage> messages_;
  std::deque<Batch> batches_;
};

}  // namespace penstock::server
