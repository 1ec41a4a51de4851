// SPDX-License-Identifier: Apache-2.0
#pragma once
// The trainer's half of the protocol between a trainer and the workers of a pool: the workers that it knows, its links
// with them, and its requests to each (dispatch.h). A pure state machine; the I/O thread around it has the sockets and
// the bytes.
//
// An answer of a worker counts if its link is the one in force, and if the request was sent to it and is unanswered.
// All other answers are ignored: those of workers that were lost, second answers, answers that come twice.

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/instant.h"
#include "cluster/dispatch.h"
#include "cluster/link.h"
#include "cluster/renewal.h"
#include "wire/batch_key.h"
#include "wire/data_message.h"
#include "wire/reports.h"

namespace penstock::cluster {

// Workers that are connected to at once and of whom nothing was heard: a list of thousands that do not answer must not
// take all descriptors that a trainer may have. Others wait, and take turns with them.
constexpr size_t kSilentCountMax = 64;
constexpr Duration kSilentTurn = std::chrono::seconds(2);

// Messages in a row, before an answer of the worker counts, that are wrong and for which the network is blamed.
constexpr uint32_t kDoubtCountMax = 2;
// Workers that are remembered as dismissed, and as served; a pool has no more.
constexpr size_t kDismissedCountMax = 4096;
constexpr size_t kServedCountMax = 4096;

struct PoolSessionOptions {
  uint64_t trainer_id = 0;    // that no session had before: each numbers its links from 1
  uint64_t credit_bytes = 0;  // of each worker
  DispatchOptions dispatch = {};
};

// Thread-compatible.
class PoolSession {
 public:
  explicit PoolSession(const PoolSessionOptions& options);

  struct Command {
    enum class Kind : uint8_t {
      kConnect,     // a worker is new, or came back elsewhere
      kDisconnect,  // nothing is said to it any more, but for a goodbye at the end where `rests`
      kRenew,       // if there is a connection to it, it is made anew: nothing has come over it for long
      kSend,        // this message; a request with its content, and that of a lane that starts with its state
      kFail,        // too many workers died of this batch
      kDistrust,    // what the worker sent is wrong: its link has ended, and it is greeted again unless it is dismissed
    };
    Kind kind = Kind::kSend;
    uint64_t worker_id = 0;
    wire::ToWorker message{};
    // Of kDisconnect: the worker may keep the process of this trainer's job. `message` is the goodbye that ends it.
    bool rests = false;
    wire::BatchKey key{};      // of kFail
    uint32_t death_count = 0;  // of kFail
    SharedContent content{};   // of kFail: the content of the request
    // Of kDistrust: the request that counts a death for it, if one does, what was wrong, and whether the worker is
    // asked for nothing any more.
    std::optional<wire::BatchKey> asked{};
    std::string reason{};
    bool is_dismissed = false;

    friend bool operator==(const Command&, const Command&) = default;
  };
  std::vector<Command> take_commands();

  // The workers that this trainer may use now. One that is not named is gone, and its answers count no more. One that
  // was dismissed stays so.
  void set_roster(std::span<const wire::RosterEntry> entries, Instant now);

  // A message of a worker. True if it is an answer that counts, whose bytes are the batch: they are kept by the caller,
  // who has then acknowledged them.
  [[nodiscard]] bool receive(uint64_t worker_id, const wire::ToTrainer& message, uint64_t bytes, Instant now);
  // A piece of a batch came on this link: the worker lives. A pong can wait behind a large batch for longer than a
  // lease.
  void heard(uint64_t worker_id, uint32_t link, Instant now);
  // Whether the worker has answered the hello of the link in force.
  bool is_open(uint64_t worker_id) const;
  // Whether this is the worker's link in force, so that its messages count.
  bool is_in_force(uint64_t worker_id, uint32_t link) const;
  // The messages of this link do not fit together, so that one of them was lost: the link is made anew, after a pause
  // (RemakeClock) where that happened before and no answer has counted since. A worker whose links are made anew time
  // and again is distrusted.
  void lose_track(uint64_t worker_id, uint32_t link, Instant now);
  // An answer of the worker is here, whose pieces are not. It is received once they are.
  void answer_waits(uint64_t worker_id);
  // Who has made a message wrong: the worker, whose key or seal it has, or perhaps somebody on the way.
  enum class Wrong : uint8_t { kByWorker, kPerhapsOnTheWay };
  // What the worker sent is no message, or no answer to its request `asked`; without one, it is the request that the
  // worker works on. The link ends. While another worker is there, that one makes what this one owes, and a worker that
  // is to blame is dismissed: it is not greeted again. So is one whose messages are wrong kDoubtCountMax times and once
  // more before an answer counts. Where no other is there, the worker is greeted again, and the request counts a death:
  // no worker holds a request up for ever. Returns whether the worker was dismissed.
  bool distrust(uint64_t worker_id, std::optional<wire::BatchKey> asked, std::string reason, Instant now,
                Wrong wrong = Wrong::kByWorker);
  // The connection to a worker ended, most likely because its process did. When the worker says later that it lives,
  // the batch that it was making is blamed no longer: connections can end by themselves, time and again. Where the
  // worker itself tells of a death (kDied), that one stands.
  void died(uint64_t worker_id, Instant now);
  // There is a connection to a worker, a new one if there was one before: the last messages may be lost.
  void connected(uint64_t worker_id, Instant now);
  // Says goodbye for good to every worker that may have anything of this trainer, and forgets them.
  void leave(Instant now);

  // `preferred` is the worker that a recall goes to, if it is still here: see Dispatch::ask.
  void ask(wire::BatchKey key, wire::Lane lane, Instant now, SharedContent content = nullptr,
           std::optional<uint64_t> preferred = std::nullopt);
  void forget(wire::BatchKey key, Instant now);
  // Takes every request of another epoch than this one back.
  void forget_other_epochs(uint32_t epoch, Instant now);
  void end_lane(uint32_t epoch, wire::Lane lane, Instant now);

  void tick(Instant now);
  std::optional<Instant> next_tick() const;

  const Dispatch& dispatch() const { return dispatch_; }
  // Workers with a link, and those that are known, of whom some may wait for their turn to be connected to.
  size_t open_count() const;
  size_t known_count() const { return peers_.size() + waiting_.size(); }
  // The known workers that said that they cannot make this trainer's batches.
  size_t declined_count() const;

 private:
  enum class State : uint8_t {
    kApart,     // no link; the next hello is due at `hello_at`
    kGreeting,  // a hello is unanswered
    kOpen,
  };
  struct Peer {
    uint32_t incarnation = 0;
    State state = State::kApart;
    Link link;
    std::optional<WorkerSlot> slot;         // while the dispatch counts on it
    std::optional<wire::BatchKey> blamed;   // for its death, until it is heard again
    std::deque<Dispatch::Command> delayed;  // until the worker has answered the hello
    bool is_withdrawn = false;
    bool is_leaving = false;
    bool has_spoken = false;
    Instant named_at{};  // when its turn began
    bool has_answer_waiting = false;
    uint32_t remade_count = 0;  // links in a row that were made anew, and ended without an answer that counts
    uint32_t doubt_count = 0;   // wrong messages in a row that may be somebody else's, without an answer that counts
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
  // The message as the next of the peer's link.
  wire::ToWorker stamped(Peer& peer, wire::ToWorker message) const;
  void send_request(uint64_t worker_id, Peer& peer, wire::BatchKey key);
  void carry_out(Instant now);
  void part_from(uint64_t worker_id);

  PoolSessionOptions options_;
  Dispatch dispatch_;
  std::map<uint64_t, Peer> peers_;
  std::deque<wire::RosterEntry> waiting_;     // named, and not connected to yet
  std::set<uint64_t> dismissed_;              // workers, whatever their incarnation
  std::set<uint64_t> served_;                 // workers that have welcomed this trainer, and may keep its process
  std::map<WorkerSlot, uint64_t> worker_of_;  // by slot in use
  WorkerSlot next_slot_ = 1;
  uint32_t next_link_ = 1;  // of whichever worker, so that no number is used twice
  std::vector<Command> commands_;
};

}  // namespace penstock::cluster
