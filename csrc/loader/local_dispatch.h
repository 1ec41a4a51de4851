// SPDX-License-Identifier: Apache-2.0
#pragma once
// Which local worker makes which batch, where nothing in a batch says who made it: the one that will answer soonest, by
// the dispatch that pools have. What a worker owed that died is made by the others; a batch that kills one worker after
// the other fails alone. Decides and sends nothing: its caller owns the sockets.
//
// A worker does not say which request it has begun. So whatever it owed when it died is made alone from then on, where
// the next death is its own.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/instant.h"
#include "cluster/dispatch.h"
#include "wire/batch_key.h"
#include "wire/message.h"

namespace penstock::loader {

// Confined to the I/O thread.
class LocalDispatch {
 public:
  using Message = std::vector<std::byte>;

  // `depth` requests at most are with a worker at once, and one where batches take long.
  LocalDispatch(uint32_t worker_count, uint32_t depth);

  struct Send {
    uint32_t worker_id;
    Message message;
  };
  // The messages that follow from the events since the last call, in order.
  std::vector<Send> take_sends();

  struct Failure {
    wire::BatchKey key;
    uint32_t death_count;
  };
  // Batches that too many workers died of.
  std::vector<Failure> take_failures();

  // An epoch begins, or begins early. What was asked for of epochs that are over is forgotten.
  void announce(wire::RequestKind kind, uint32_t epoch, Message message);
  void ask(wire::BatchKey key, cluster::SharedContent content, Instant now);

  void worker_came(uint32_t worker_id, Instant now);
  void worker_died(uint32_t worker_id, Instant now);
  // Whether anybody can still make a batch, or may yet come to.
  bool has_workers() const { return lost_count_ < worker_count_; }

  // True if this is the answer that counts.
  bool answered(uint32_t worker_id, wire::BatchKey key, Instant now);

 private:
  void carry_out();

  const uint32_t worker_count_;
  uint32_t lost_count_ = 0;
  cluster::Dispatch dispatch_;
  std::optional<uint32_t> early_epoch_;
  Message early_message_;
  std::vector<bool> knows_early_;  // by worker: it was told of the early epoch
  std::vector<Send> sends_;
  std::vector<Failure> failures_;
};

}  // namespace penstock::loader
