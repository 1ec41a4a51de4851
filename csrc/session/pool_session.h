// SPDX-License-Identifier: Apache-2.0
#pragma once
// The trainer's half of the protocol between a trainer and a pool's workers: the workers that it knows, its links with
// them, and its requests to each (dispatch.h). A pure state machine; the surrounding I/O thread has the sockets and the
// bytes.
//
// A worker's answer counts if its link is the one in force, and if the request was sent to the worker and is
// unanswered. All other answers are ignored: answers from lost workers, second answers, and duplicates.

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "session/dispatch.h"
#include "session/enrolment.h"
#include "session/worker_session.h"
#include "wire/message.h"
#include "wire/reports.h"

namespace penstock::session {

// The number of workers that are connected to at the same time and have not sent any message: a list of thousands of
// unresponsive workers must not use up the trainer's file descriptors. Others wait, and take turns with them.
constexpr size_t kSilentCountMax = 64;
constexpr Duration kSilentTurn = std::chrono::seconds(2);

// Consecutive invalid messages, before an answer of the worker counts, that are blamed on the network.
constexpr uint32_t kDoubtCountMax = 2;
// Workers that are remembered as dismissed, and as served; a pool has at most this many.
constexpr size_t kDismissedCountMax = 4096;
constexpr size_t kServedCountMax = 4096;

struct PoolSessionOptions {
  uint64_t trainer_id = 0;    // not used by any earlier session, because each session numbers its links from 1
  uint64_t credit_bytes = 0;  // per worker
  DispatchOptions dispatch = {};
};

// Thread-compatible.
class PoolSession {
 public:
  explicit PoolSession(const PoolSessionOptions& options);

  struct Command {
    enum class Kind : uint8_t {
      kConnect,     // a worker is new, or returned at another address
      kDisconnect,  // no more messages are sent to it, except a goodbye at the end if `rests`
      kRenew,       // its connection, if there is one, is replaced: no data has arrived on it for a long time
      kSend,        // this message; a request with its content, and at a lane start with the lane's state
      kFail,        // too many workers died during this batch
      kDistrust,    // its message is invalid: its link has ended, and it is greeted again unless it is dismissed
    };
    Kind kind = Kind::kSend;
    uint64_t worker_id = 0;
    wire::ToWorker message{};
    // Of kDisconnect: the worker may keep the process of this trainer's job. `message` is the goodbye that ends the
    // process.
    bool rests = false;
    wire::BatchKey key{};      // of kFail
    uint32_t death_count = 0;  // of kFail
    SharedContent content{};   // of kFail: the content of the request
    // Of kDistrust: the request that counts a death for it, if any, a description of the error, and whether the worker
    // is no longer used.
    std::optional<wire::BatchKey> asked{};
    std::string reason{};
    bool is_dismissed = false;

    friend bool operator==(const Command&, const Command&) = default;
  };
  std::vector<Command> take_commands();

  // The workers that this trainer may use now. A worker that is not listed is gone, and its answers no longer count. A
  // dismissed worker remains dismissed.
  void set_roster(std::span<const wire::RosterEntry> entries, Instant now);

  // Processes a message from a worker. Returns true if it is an answer that counts, whose bytes are the batch: the
  // caller keeps them, and the answer is acknowledged.
  [[nodiscard]] bool receive(uint64_t worker_id, const wire::ToTrainer& message, uint64_t bytes, Instant now);
  // A chunk of a batch arrived on this link, so the worker is alive. A pong may wait behind a large batch for longer
  // than a lease.
  void heard(uint64_t worker_id, uint32_t link, Instant now);
  // Whether the worker has answered the hello of the link in force.
  bool is_open(uint64_t worker_id) const;
  // Whether this is the worker's link in force, so that its messages count.
  bool is_in_force(uint64_t worker_id, uint32_t link) const;
  // The messages of this link do not fit together, so one of them was lost: the link is replaced, after a pause
  // (RemakeClock) if that has happened before and no answer has counted since. A worker whose links break repeatedly is
  // distrusted.
  void lose_track(uint64_t worker_id, uint32_t link, Instant now);
  // An answer of the worker has arrived, but its chunks have not. It is received once they have.
  void answer_waits(uint64_t worker_id);
  // The origin of an invalid message: the worker, whose key or seal it carries, or possibly a third party in transit.
  enum class Wrong : uint8_t { kByWorker, kMaybeInFlight };
  // The worker sent an invalid message, or an invalid answer to its request `asked`; without `asked`, the request is
  // the one that the worker works on. The link ends. If there is another worker, it makes this worker's outstanding
  // batches, and a worker that is to blame is dismissed: it is not greeted again. A worker is to blame, too, if more
  // than kDoubtCountMax of its messages are invalid before an answer counts. If there is no other worker, the worker is
  // greeted again, and the request counts a death, so that no worker blocks a request for ever. Returns whether the
  // worker was dismissed.
  bool distrust(uint64_t worker_id, std::optional<wire::BatchKey> asked, std::string reason, Instant now,
                Wrong wrong = Wrong::kByWorker);
  // The connection to a worker ended, most likely because its process did. If the worker later proves to be alive, the
  // batch that it was making is no longer blamed: connections may end by themselves, repeatedly. A death that the
  // worker itself reports (kDied) is not revoked.
  void died(uint64_t worker_id, Instant now);
  // There is a new connection to a worker, which replaces the previous one if there was one: the last messages may be
  // lost.
  void connected(uint64_t worker_id, Instant now);
  // Sends a final goodbye to every worker that may hold state of this trainer, and forgets them.
  void leave(Instant now);

  // `preferred` is the worker that receives a recall, if it is still connected: see Dispatch::ask.
  void ask(wire::BatchKey key, wire::Lane lane, Instant now, SharedContent content = nullptr,
           std::optional<uint64_t> preferred = std::nullopt);
  void forget(wire::BatchKey key, Instant now);
  // Takes back all requests of other epochs.
  void forget_other_epochs(uint32_t epoch, Instant now);
  void end_lane(uint32_t epoch, wire::Lane lane, Instant now);

  void tick(Instant now);
  std::optional<Instant> next_tick() const;

  const Dispatch& dispatch() const { return dispatch_; }
  // The number of workers with a link, and of known workers, some of which may be waiting to be connected to.
  size_t open_count() const;
  size_t known_count() const { return peers_.size() + waiting_.size(); }
  // The known workers that reported that they cannot make this trainer's batches.
  size_t declined_count() const;

 private:
  enum class State : uint8_t {
    kUnlinked,  // no link; the next hello is due at `hello_at`
    kGreeting,  // waiting for the answer to a hello
    kOpen,
  };
  struct Peer {
    uint32_t incarnation = 0;
    State state = State::kUnlinked;
    Link link;
    std::optional<WorkerSlot> slot;         // while the dispatch uses it
    std::optional<wire::BatchKey> blamed;   // for the worker's death, until the worker is heard again
    std::deque<Dispatch::Command> delayed;  // until the worker has answered the hello
    bool is_withdrawn = false;
    bool is_leaving = false;
    bool has_responded = false;
    Instant named_at{};  // start of its turn
    bool has_answer_waiting = false;
    uint32_t remade_count = 0;  // consecutive links that were replaced, and ended without an answer that counts
    uint32_t doubt_count = 0;   // consecutive invalid messages, possibly forged, without an answer that counts
    bool has_declined = false;  // it is not greeted again
    Instant hello_at{};
    Instant heard_at{};
    RenewalClock renewal{{}};
    RemakeClock remaking;
    Instant ping_at{};
  };

  void name_waiting(std::span<const wire::RosterEntry> entries);
  void connect_to_waiting(Instant now);
  void end_silent_turns(Instant now);
  size_t silent_count() const;
  static bool is_in_force(const Peer& peer, uint32_t link);
  void greet(uint64_t worker_id, Peer& peer, Instant now);
  void make_anew(uint64_t worker_id, Peer& peer, Instant now);
  bool end_for(uint64_t worker_id, Peer& peer, std::optional<wire::BatchKey> asked, std::string reason,
               bool is_to_blame, Instant now);
  bool has_other(uint64_t worker_id, Instant now) const;
  void welcome(uint64_t worker_id, Peer& peer, bool is_fresh, Instant now);
  void lose(Peer& peer, Loss loss, Instant retry_at, Instant now);
  void send(uint64_t worker_id, Peer& peer, wire::ToWorker message);
  // The message with the peer's link and its next stamp.
  wire::ToWorker stamped(Peer& peer, wire::ToWorker message) const;
  void send_request(uint64_t worker_id, Peer& peer, wire::BatchKey key);
  void carry_out(Instant now);
  void part_from(uint64_t worker_id);

  PoolSessionOptions options_;
  Dispatch dispatch_;
  std::map<uint64_t, Peer> peers_;
  std::deque<wire::RosterEntry> waiting_;     // named, and not connected to yet
  std::set<uint64_t> dismissed_;              // workers, in any incarnation
  std::set<uint64_t> served_;                 // workers that have welcomed this trainer, and may keep its process
  std::map<WorkerSlot, uint64_t> worker_of_;  // by slot in use
  WorkerSlot next_slot_ = 1;
  uint32_t next_link_ = 1;  // for all workers together, so that no number is used twice
  std::vector<Command> commands_;
};

}  // namespace penstock::session
