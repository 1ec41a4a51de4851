// SPDX-License-Identifier: Apache-2.0
#pragma once
// Chooses the local worker for each batch, if a batch does not depend on its worker: the worker expected to answer
// soonest, by the same dispatch as in pools. The outstanding batches of a dead worker are made by the others; a batch
// that kills one worker after another fails alone. This class makes decisions and sends no messages: its caller owns
// the sockets.
//
// A late batch is also requested from a second worker, if every worker that has answered reports that its dataset stays
// unchanged: then fetching a sample twice has no visible effect. If the second worker's batch arrives first, the late
// worker receives no requests until it answers or an epoch starts, since a request to a local worker cannot be
// cancelled.
//
// A worker does not report which request it has started. So each of a dead worker's outstanding batches is made alone
// from then on, so that the next death can be attributed to its batch.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/instant.h"
#include "session/dispatch.h"
#include "wire/batch_key.h"
#include "wire/job_record.h"

namespace penstock::loader {

// The message that requests a batch from a local worker. It refers to the indices in `content`.
wire::ToJob work_of(const session::RequestContent& content);

// Confined to the I/O thread.
class LocalDispatch {
 public:
  using Message = std::vector<std::byte>;

  // A worker has at most `depth` requests at once, and only one if batches take long.
  LocalDispatch(uint32_t worker_count, uint32_t depth);

  struct Send {
    uint32_t worker_id;
    Message message;
  };
  // Returns the messages to send because of the events since the last call, in order.
  std::vector<Send> take_sends();

  struct Failure {
    wire::BatchKey key;
    uint32_t death_count;
  };
  // Returns the batches that killed too many workers.
  std::vector<Failure> take_failures();

  // An epoch starts, or starts early. Requests of finished epochs are forgotten.
  void announce(wire::ToJob::Kind kind, uint32_t epoch, Message message, Instant now);
  void ask(wire::BatchKey key, session::SharedContent content, Instant now);

  void worker_came(uint32_t worker_id, Instant now);
  void worker_died(uint32_t worker_id, Instant now);
  // Whether any worker can make a batch, now or after its start.
  bool has_workers() const { return lost_count_ < workers_.size(); }
  // has_workers() after the loss of one more worker.
  bool has_others() const { return lost_count_ + 1 < workers_.size(); }

  // Returns true if this is the first answer for its batch. `dataset_stays`: the flag in the answer.
  bool answered(uint32_t worker_id, wire::BatchKey key, bool dataset_stays, Instant now);

  // Looks for late batches; next_tick() returns when it may next find one.
  void tick(Instant now);
  std::optional<Instant> next_tick() const { return dispatch_.next_tick(); }
  uint64_t hedge_count() const { return dispatch_.hedge_count(); }

 private:
  struct Worker {
    std::optional<bool> dataset_stays{};  // in its last answer
    bool knows_early = false;             // the early epoch was announced to it
    bool is_late = false;                 // it is still making a batch that another worker has answered
    bool is_dead = false;
  };

  void carry_out(Instant now);
  // The worker may receive requests again.
  void end_lateness(uint32_t worker_id, Instant now);
  void send_request(uint32_t worker_id, wire::BatchKey key);

  uint32_t lost_count_ = 0;
  session::Dispatch dispatch_;
  std::optional<uint32_t> early_epoch_;
  Message early_message_;
  std::vector<Worker> workers_;
  std::vector<Send> sends_;
  std::vector<Failure> failures_;
};

}  // namespace penstock::loader
