// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a pool worker sends its answers to the trainer. AnswerOutbox is the queue of messages and of the chunks of
// batches; a trainer on this machine gets batches as slabs of shared memory instead (SlabHandover).

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "net/server_socket.h"
#include "server/maker.h"
#include "shm/channel.h"
#include "shm/slab_pool.h"
#include "wire/message.h"
#include "wire/reports.h"

namespace penstock::server {

// How a worker hands batches to the trainer that started it: as slabs of shared memory, which the answer names, instead
// of as encrypted chunks. The trainer opens a channel before it greets the worker on a new link, and the worker passes
// the descriptors of its arenas through this channel.
//
// A slab that was handed over is used by both: it is free again when the trainer has released it, and the worker has
// been notified that the batch arrived. A batch that has to be sent once more, on a later link, is copied to separate
// memory, since the trainer may have released, or may still be reading, the first slab. If a link ends before the
// trainer has read all of it, the slabs named in the unread part are never released; therefore the worker starts a new
// arena for every new link.
//
// Confined to the I/O thread.
class SlabHandover {
 public:
  // Listens at `name`, which no other process may use. `slabs` contains the batches and must outlive this object.
  static Result<std::unique_ptr<SlabHandover>> listen(const std::string& name, shm::SlabPool& slabs);

  // For `listen`.
  SlabHandover(shm::ChannelListener listener, shm::SlabPool& slabs) : listener_(std::move(listener)), slabs_(slabs) {}

  // Starts a link, which replaces the previous one. Its batches are handed over if its trainer has connected for it.
  void begin(uint64_t trainer_id, uint32_t link);
  void end();
  bool is_on() const { return channel_.has_value(); }

  // Passes the memory that contains the batch, if it is new to the trainer, and returns the fields for the answer.
  // Empty if the batch is not in shared memory or passing failed: it is then sent in chunks.
  std::optional<wire::SlabPlace> hand_over(HeldBatch& batch);

 private:
  // A trainer that will greet this worker on the link named in `hello`.
  struct Newcomer {
    wire::HandoverHello hello;
    shm::Channel channel;
  };

  std::optional<wire::SlabPlace> name(const shm::SlabRegion& region);
  std::optional<wire::SlabPlace> hand_copy_over(const HeldBatch& batch);

  shm::ChannelListener listener_;
  shm::SlabPool& slabs_;
  std::deque<Newcomer> newcomers_;           // in order of arrival
  std::optional<shm::Channel> channel_;      // of the current link
  std::optional<uint32_t> passed_arena_id_;  // the lasting arena known to the trainer
  uint32_t copy_count_ = 0;
};

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

// The outgoing queue of a pool worker to its trainer, in order: messages, and separately the chunks of batches, which
// are sent on another connection. A message never waits for chunks; the trainer accepts an answer when its chunks have
// arrived.
//
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
