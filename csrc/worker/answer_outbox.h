// SPDX-License-Identifier: Apache-2.0
#pragma once
// The messages of a pool's worker to its trainer, in order. Batches leave in pieces, straight from their slabs, and a
// limited number of pieces is in ZeroMQ's hands at once: its own marks count messages and not bytes.

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>

#include "net/server_socket.h"
#include "wire/data_message.h"
#include "worker/pool_work.h"
#include "worker/work_exchange.h"

namespace penstock::worker {

constexpr uint64_t kSentBytesMax = uint64_t{64} << 20;  // of pieces that ZeroMQ has not sent yet

struct OutgoingMessage {
  std::string routing_id;
  wire::ToTrainer message;
  uint64_t worker_id = 0;
  uint32_t incarnation = 0;
  std::shared_ptr<const PoolResult> result =
      {};                 // of an answer; shared with the server, which may have to send it again
  std::string text = {};  // why a trainer is refused
};

// Confined to the I/O thread.
class AnswerOutbox {
 public:
  // `exchange` is woken when pieces have left. Its owner outlives the context of the sockets.
  explicit AnswerOutbox(const WorkExchange& exchange) : exchange_(exchange) {}

  void push(OutgoingMessage message) { messages_.push_back({std::move(message), 0}); }
  // Forgets the answers of a link that has ended. Pieces that are still on their way over a connection that is gone
  // hold nobody up.
  void clear();
  bool is_empty() const { return messages_.empty(); }

  // Sends as much as may be on its way. Messages to a peer that is gone are dropped: it asks again on its next link.
  void pump(net::ServerSocket& socket);

 private:
  struct Waiting {
    OutgoingMessage outgoing;
    uint64_t offset;  // of a batch, the part that is sent
  };
  // Returns whether the whole message has left; one that must wait leaves `is_full_` set.
  bool send_piece(net::ServerSocket& socket, Waiting& waiting);

  const WorkExchange& exchange_;
  std::deque<Waiting> messages_;
  using Counter = std::atomic<uint64_t>;
  // The bytes of the pieces on their way. Each piece shares the counter and lowers it on ZeroMQ's thread.
  std::shared_ptr<Counter> sent_bytes_ = std::make_shared<Counter>(0);
  bool is_full_ = false;
};

}  // namespace penstock::worker
