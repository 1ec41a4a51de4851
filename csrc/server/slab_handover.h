// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a worker hands batches to the trainer that started it: as slabs of shared memory, which the answer names, instead
// of as encrypted chunks. The trainer opens a channel before it greets the worker on a new link, and the worker passes
// the descriptors of its arenas through this channel.
//
// A slab that was handed over is used by both: it is free again when the trainer has released it, and the worker has
// been notified that the batch arrived. A batch that has to be sent once more, on a later link, is copied to separate
// memory, since the trainer may have released, or may still be reading, the first slab. If a link ends before the
// trainer has read all of it, the slabs named in the unread part are never released; therefore the worker starts a new
// arena for every new link.

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/result.h"
#include "server/pool_work.h"
#include "shm/channel.h"
#include "shm/slab_pool.h"
#include "wire/slab_place.h"

namespace penstock::server {

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

}  // namespace penstock::server
