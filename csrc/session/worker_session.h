// SPDX-License-Identifier: Apache-2.0
#pragma once
// WorkerSession, the worker's half of the protocol between a trainer and a worker, and Link, one end of a link between
// the two, by which each side detects lost messages.

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "wire/message.h"

namespace penstock::session {

// One end of a link between a trainer and a worker. The trainer numbers its links with a worker in ascending order, and
// each side numbers its messages on a link: 1, 2, 3. So each side can detect messages of an ended link, duplicate
// messages and missing messages, regardless of the underlying connection. A link on which a message was lost is never
// repaired: the trainer opens another one and repeats the requests that it still wants. A value type.
class Link {
 public:
  enum class Receipt : uint8_t {
    kNext,  // the next message: accept it
    kOld,   // from an ended link, or a duplicate: drop it
    kGap,   // an earlier message was lost
  };

  explicit Link(uint32_t number = 0) : number_(number) {}

  uint32_t number() const { return number_; }

  // The stamp for the message that is being sent.
  uint64_t stamp() { return ++sent_; }
  // The stamp of the last message. Pings contain it, so that the loss of a last message is detected.
  uint64_t sent() const { return sent_; }

  Receipt receive(uint32_t number, uint64_t stamp) {
    if (number != number_ || stamp <= received_) return Receipt::kOld;
    if (stamp != received_ + 1) return Receipt::kGap;
    received_ = stamp;
    return Receipt::kNext;
  }

 private:
  uint32_t number_;
  uint64_t sent_ = 0;
  uint64_t received_ = 0;
};

// A link ends after this time without a message from the peer; both sides send one every ping_interval.
constexpr Duration kLease = std::chrono::milliseconds(1500);
constexpr Duration kPingInterval = std::chrono::milliseconds(500);
constexpr size_t kForgottenCountMax = 64;  // trainers whose last link a worker remembers

// The trainer that a worker works for, the batches that it has to make, and the answers that it holds until the trainer
// has them. A pure state machine; the surrounding process has the sockets, the dataset and the bytes of requests and
// answers.
//
// A worker works for one trainer at a time: others are refused until that one leaves or is silent for a lease. In a
// pool the worker starts work only for the trainer that the controller has assigned it to. It makes one batch at a
// time, in the order of the requests. An answer is held until it is acknowledged, and sent again if the trainer asks
// for it on another link.
//
// Thread-compatible.
class WorkerSession {
 public:
  struct Command {
    enum class Kind : uint8_t {
      kSend,  // this message to the trainer that it names; an answer with the bytes of its key
      kDrop,  // the bytes of this answer will not be requested again
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
  // The request to work on now; nullopt if there is none or one is in progress.
  std::optional<Request> begin();
  // As begin(), for a request of the queue that belongs to no lane. Call only if next() returns a request.
  Request begin(wire::BatchKey key);
  // The requests that were not started, the next one first.
  const std::deque<Request>& queue() const { return queue_; }
  // The request that begin() will return once no work is in progress, as far as is known.
  std::optional<Request> next() const;
  // The work in progress is done; the caller has its bytes.
  void finished();
  // The work in progress cannot be done here, and neither can any other: drains.
  void hand_back();
  bool is_busy() const { return running_.has_value(); }
  // Whether the batch in progress is still wanted.
  bool is_wanted() const { return running_ && running_->is_wanted; }
  // Whether it is wanted, or the trainer is about to announce on a new link whether it is.
  bool may_be_wanted() const;

  // Accepts no more requests, and hands back the ones that were not started.
  void drain();
  bool is_draining() const { return is_draining_; }
  // Whether no batch is in progress, held or waiting any more.
  bool is_empty() const { return queue_.empty() && !running_ && held_.empty(); }
  // The trainer that may be served from now on, by the controller's orders; 0: none. A trainer that is already being
  // served may continue, also on further links, unless `is_to_part`: then a trainer other than the assigned one is
  // notified that its link is broken, and is given up.
  void assign(uint64_t trainer_id, bool is_to_part);
  // Any trainer may be served, as initially: the controller has been silent for a long time, or there is none.
  void serve_anyone() { assigned_id_.reset(); }
  // Gives up the trainer and all of its requests: this worker's lease is lost.
  void abandon();
  // The process that made this trainer's batches has ended, and its work is lost: lanes, and the batch that was being
  // made. finished() must not be called for that batch. The trainer is notified, if it is still served, and sends a new
  // hello.
  void lose_process(uint64_t trainer_id);
  // Gives up the trainer and ignores it from now on: its batches cannot be made here.
  void decline();
  // Whether this trainer was declined.
  bool is_declined(uint64_t trainer_id) const;
  // The trainers that were declined, the latest last; at most kDeclinedCountMax.
  const std::deque<uint64_t>& declined() const { return declined_; }

  // The trainer that is being served; 0 for none.
  uint64_t trainer_id() const { return tenant_ ? tenant_->trainer_id : 0; }
  size_t queued_count() const { return queue_.size(); }
  size_t held_count() const { return held_.size(); }
  // The number of held answers that the trainer is known to want on this link.
  size_t claimed_count() const;

 private:
  struct Tenant {
    uint64_t trainer_id;
    Link link;
    Instant heard_at;
    bool is_broken = false;       // a message was lost; only another hello counts
    uint32_t repeated_count = 0;  // requests outstanding on the previous link that have not been repeated yet
    bool is_fresh = false;        // the trainer may not know yet that this worker has forgotten its former requests
  };
  struct Running {
    uint64_t trainer_id;  // 0 once that trainer was given up
    wire::BatchKey key{};
    bool is_wanted;
  };

  void greet(const wire::ToWorker& hello, Instant now);
  bool is_past(const wire::ToWorker& hello) const;
  void take(const wire::ToWorker& message);
  bool is_running(const wire::ToWorker& request) const;
  void cancel(wire::BatchKey key);
  void send(wire::ToTrainer::Kind kind, wire::BatchKey key = {}, bool is_fresh = false);
  void answer_unlinked(const wire::ToWorker& message, wire::ToTrainer::Kind kind);
  void send_unstamped(wire::ToTrainer::Kind kind);
  void drop_held(wire::BatchKey key);
  void drop_unclaimed();

  std::optional<Tenant> tenant_;
  std::optional<uint64_t> assigned_id_;  // the trainer that may connect; 0: none; nullopt: any
  std::deque<Request> queue_;
  std::optional<Running> running_;
  std::map<wire::BatchKey, bool> held_;  // made and not acknowledged; whether the trainer asked for it on this link
  bool is_draining_ = false;
  std::deque<uint64_t> declined_;                        // trainers, the latest last
  std::deque<std::pair<uint64_t, uint32_t>> forgotten_;  // trainers and their last links, the latest last
  std::vector<Command> commands_;
};

}  // namespace penstock::session
