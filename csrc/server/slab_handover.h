// SPDX-License-Identifier: Apache-2.0
#pragma once
// How a worker that a trainer has started itself gives it batches: as slabs of shared memory, which the answer names,
// in the place of sealed pieces. The trainer opens a channel before it greets the worker on a new link, and the worker
// passes it the descriptors of its arenas there.
//
// A slab that was handed over belongs to both: it is free again when the trainer has released it, and the worker has
// been told that the batch arrived. A batch that has to be sent once more, on a later link, is copied to memory of its
// own, since the trainer may have released, or may still read, the first slab. Slabs that were named on a link whose
// end the trainer did not read are released by nobody; so every new link has the worker begin a new arena.

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
  // Listens at `name`, which no other process has. `slabs`, which outlives this, is where the batches lie.
  static Result<std::unique_ptr<SlabHandover>> listen(const std::string& name, shm::SlabPool& slabs);

  // For `listen`.
  SlabHandover(shm::ChannelListener listener, shm::SlabPool& slabs) : listener_(std::move(listener)), slabs_(slabs) {}

  // A link begins in the place of the one before. Batches of it are handed over if its trainer has connected for it.
  void begin(uint64_t trainer_id, uint32_t link);
  void end();
  bool is_on() const { return channel_.has_value(); }

  // Passes the memory that the batch lies in, if it is new to the trainer, and returns the words for the answer.
  // Nothing where the batch lies in no shared memory, or passing failed: it crosses in pieces then.
  std::optional<wire::SlabPlace> hand_over(HeldBatch& batch);

 private:
  // A trainer that will greet this worker on the link that it has named.
  struct Newcomer {
    wire::HandoverHello hello;
    shm::Channel channel;
  };

  std::optional<wire::SlabPlace> name(const shm::SlabRegion& region);
  std::optional<wire::SlabPlace> hand_copy_over(const HeldBatch& batch);

  shm::ChannelListener listener_;
  shm::SlabPool& slabs_;
  std::deque<Newcomer> newcomers_;           // in the order in which they came
  std::optional<shm::Channel> channel_;      // of the link in force
  std::optional<uint32_t> passed_arena_id_;  // the lasting arena that the trainer knows
  uint32_t copy_count_ = 0;
};

}  // namespace penstock::server
