// SPDX-License-Identifier: Apache-2.0
#pragma once
// The worker's half of the protocol between a trainer and a worker: the trainer that it works for, the batches that it
// is to make, and the answers that it holds until the trainer has them. A pure state machine; the process around it has
// the sockets, the dataset and the bytes of requests and answers.
//
// A worker works for one trainer at a time: another is refused until the first says goodbye or was silent for a lease.
// In a pool it begins only for the trainer that the controller has given it to.
// It makes one batch at a time, in the order of the requests. An answer is held until it is acknowledged, and sent
// again if the trainer asks for it on another link.

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/instant.h"
#include "cluster/link.h"
#include "wire/batch_key.h"
#include "wire/data_message.h"

namespace penstock::cluster {

// A link ends after this time without a message from the other side; both sides send one every ping_interval.
constexpr Duration kLease = std::chrono::milliseconds(1500);
constexpr Duration kPingInterval = std::chrono::milliseconds(500);
constexpr size_t kForgottenCountMax = 64;  // trainers whose last link a worker remembers

// Thread-compatible.
class WorkerSession {
 public:
  struct Command {
    enum class Kind : uint8_t {
      kSend,  // this message to the trainer that it names; an answer with the bytes of its key
      kDrop,  // nobody will ask for the bytes of this answer again
    };
    Kind kind = Kind::kSend;
    uint64_t trainer_id = 0;
    wire::ToTrainer message{};
    wire::BatchKey key{};  // of kDrop

    friend bool operator==(const Command&, const Command&) = default;
  };
  std::vector<Command> take_commands();

  void receive(const wire::ToWorker& message, Instant now);
  // Forgets a trainer that was silent for a lease.
  void tick(Instant now);
  std::optional<Instant> next_tick() const;

  struct Request {
    wire::BatchKey key{};
    wire::Lane lane = wire::kNoLane;
    bool is_lane_start = false;

    friend bool operator==(const Request&, const Request&) = default;
  };
  // The request to work on now, or nothing while there is none or one is being worked on.
  std::optional<Request> begin();
  // The one that begin() gives once nothing is worked on any more, as far as is known.
  std::optional<Request> next() const;
  // The work that was begun is done; the shell has its bytes.
  void finished();
  // The work that was begun cannot be done here, and neither can any other: drains.
  void hand_back();
  bool is_busy() const { return running_.has_value(); }
  // Whether anybody still wants the batch that is being made.
  bool is_wanted() const { return running_ && running_->is_wanted; }
  // Whether it is, or the trainer is about to say on a new link whether it is.
  bool may_be_wanted() const;

  // Takes no more requests, and gives back those that were not begun.
  void drain();
  bool is_draining() const { return is_draining_; }
  // Nothing is being made, held or waited for any more.
  bool is_empty() const { return queue_.empty() && !running_ && held_.empty(); }
  // The trainer that may be served from now on, by the controller's orders; 0: none. One that is served already may go
  // on, also with further links, unless `is_to_part`: then it is told that its link is broken, and given up if it is
  // another.
  void assign(uint64_t trainer_id, bool is_to_part);
  // Whoever comes may be served, as at first: no controller has spoken for long, or there is none.
  void serve_anyone() { assigned_id_.reset(); }
  // Gives up the trainer and all that it asked for: this worker's lease is lost.
  void abandon();
  // The process that made this trainer's batches has ended, and all that it had begun with it: lanes, and the batch
  // that was being made. Nothing is to be finished for that one. The trainer is told, if it is still worked for, and
  // greets anew.
  void lose_process(uint64_t trainer_id);
  // Gives the trainer up and ignores it from now on: its batches cannot be made here.
  void decline();
  // Whether this trainer was declined.
  bool is_declined(uint64_t trainer_id) const;
  // The trainers that were declined, the latest last; at most kDeclinedCountMax.
  const std::deque<uint64_t>& declined() const { return declined_; }

  // The trainer that is worked for; 0 for none.
  uint64_t trainer_id() const { return tenant_ ? tenant_->trainer_id : 0; }
  size_t queued_count() const { return queue_.size(); }
  size_t held_count() const { return held_.size(); }
  // How many of the held answers the trainer is known to want on this link.
  size_t claimed_count() const;

 private:
  struct Tenant {
    uint64_t trainer_id;
    Link link;
    Instant heard_at;
    bool is_broken = false;       // something was lost; only another hello counts
    uint32_t repeated_count = 0;  // requests still to come that were outstanding on the link before
    bool is_fresh = false;        // the trainer may not know yet that this worker has forgotten its former requests
  };
  struct Running {
    uint64_t trainer_id;  // 0 once that was given up
    wire::BatchKey key{};
    bool is_wanted;
  };

  void greet(const wire::ToWorker& hello, Instant now);
  bool is_past(const wire::ToWorker& hello) const;
  void take(const wire::ToWorker& message);
  bool is_running(const wire::ToWorker& request) const;
  void cancel(wire::BatchKey key);
  void send(wire::ToTrainer::Kind kind, wire::BatchKey key = {}, bool is_fresh = false);
  void answer_stranger(const wire::ToWorker& message, wire::ToTrainer::Kind kind);
  void tell_unstamped(wire::ToTrainer::Kind kind);
  void drop_held(wire::BatchKey key);
  void drop_unclaimed();

  std::optional<Tenant> tenant_;
  std::optional<uint64_t> assigned_id_;  // the trainer that may come; 0: none may; nothing: any may
  std::deque<Request> queue_;
  std::optional<Running> running_;
  std::map<wire::BatchKey, bool> held_;  // made and not acknowledged; whether the trainer asked for it on this link
  bool is_draining_ = false;
  std::deque<uint64_t> declined_;                        // trainers, the latest last
  std::deque<std::pair<uint64_t, uint32_t>> forgotten_;  // trainers and their last links, the latest last
  std::vector<Command> commands_;
};

}  // namespace penstock::cluster
