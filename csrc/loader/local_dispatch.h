// SPDX-License-Identifier: Apache-2.0
#pragma once
// Chooses the local worker for each batch, where nothing in a batch says who made it: the worker that will answer
// soonest, by the dispatch that pools have. The batches that a dead worker owed are made by the others; a batch that
// kills one worker after the other fails alone. This class decides and sends nothing: its caller owns the sockets.
//
// A batch that is late is asked of a second worker where every worker that has answered says that its dataset stays as
// it is: a sample that is fetched twice is then fetched once, as far as anybody can see. A worker whose batch the other
// one made first is asked for nothing until it answers or an epoch begins, since a local worker cannot be told to stop.
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
#include "wire/job_record.h"

namespace penstock::loader {

// The message by which a local worker is asked for a batch. Its indices lie in `content`.
wire::ToJob work_of(const cluster::RequestContent& content);

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

  // An epoch begins, or begins early. Requests of epochs that are over are forgotten.
  void announce(wire::ToJob::Kind kind, uint32_t epoch, Message message, Instant now);
  void ask(wire::BatchKey key, cluster::SharedContent content, Instant now);

  void worker_came(uint32_t worker_id, Instant now);
  void worker_died(uint32_t worker_id, Instant now);
  // Whether anybody can still make a batch, or may yet come to.
  bool has_workers() const { return lost_count_ < workers_.size(); }
  // The same, once one more is lost.
  bool has_others() const { return lost_count_ + 1 < workers_.size(); }

  // True if this is the answer that counts. `dataset_stays`: as the worker says with it.
  bool answered(uint32_t worker_id, wire::BatchKey key, bool dataset_stays, Instant now);

  // Looks for batches that are late, and when that may next find one.
  void tick(Instant now);
  std::optional<Instant> next_tick() const { return dispatch_.next_tick(); }
  uint64_t hedge_count() const { return dispatch_.hedge_count(); }

 private:
  struct Worker {
    std::optional<bool> dataset_stays{};  // as it said last
    bool knows_early = false;             // it was told of the early epoch
    bool is_late = false;                 // it is still at a batch that another one made first
    bool is_dead = false;
  };

  void carry_out(Instant now);
  // Requests may go to it again.
  void end_lateness(uint32_t worker_id, Instant now);
  void send_request(uint32_t worker_id, wire::BatchKey key);

  uint32_t lost_count_ = 0;
  cluster::Dispatch dispatch_;
  std::optional<uint32_t> early_epoch_;
  Message early_message_;
  std::vector<Worker> workers_;
  std::vector<Send> sends_;
  std::vector<Failure> failures_;
};

}  // namespace penstock::loader
