// SPDX-License-Identifier: Apache-2.0
#pragma once
// A pool in one thread: controller, workers and trainers run the live state machines of csrc/session and
// csrc/scheduling on a clock of the world's own, over a network that loses, doubles, reorders and delays, while
// processes crash, stall and are cut off, and while those end or hang in which workers make their batches. All of it
// follows from the scenario's seed, so a run that fails can be run again.
//
// Invariants:
//
//   stream    every trainer is given each batch of each epoch once, in order, as a lone process makes it
//
//   progress  all of it is, some time after the last fault. A trainer waits for ever, or until its program's timeout,
//             only for what the protocol asks no other worker: a batch that hangs at two workers, one of a shard that
//             hangs, or any while every worker hangs
//
//   credit    a worker never has more bytes asked of it or held than the trainer granted, one batch aside
//
//   blame     a batch fails only if that many workers, or processes of theirs, died while making it, and a batch that
//             kills fails
//
//   sharing   no worker stays idle that a trainer could use, with a trainer that it has declined, with one that is to
//             leave it, or with one that has two more than another
//
//   given     a worker that hears of its controller begins for no trainer that it was not given to
//
//   hangs     a process that is at a batch which no trainer wants is ended within its grace, and its worker is shown as
//             stuck and given to nobody until then
//
//   drain     a worker that is told to leave has ended within its grace, whatever it is at
//
//   memory    nothing is left in a worker or a session once the trainers are done

#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <queue>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "scenario.h"
#include "scheduling/roster.h"
#include "session/enrolment.h"
#include "session/pool_session.h"
#include "session/request_order.h"
#include "session/worker_session.h"

namespace penstock::sim {

using wire::BatchKey;

constexpr uint64_t kBatchBytes = 100;
constexpr uint64_t kNowhere = std::numeric_limits<uint64_t>::max();  // a position that no batch has

// Stands for the bytes of a batch: which one it is. The oracle knows which one it must be.
struct Content {
  uint32_t job = 0;
  uint32_t epoch = 0;
  uint32_t shard = 0;     // of an iterable dataset
  uint64_t position = 0;  // in the shard, or in the epoch
  bool is_end = false;    // the shard has no more

  friend bool operator==(const Content&, const Content&) = default;
};

struct WorkerMessage {  // to a worker
  wire::ToWorker head;
  uint32_t job = 0;
  uint64_t lane_position = 0;  // with a lane that starts: the dataset's state
};
struct TrainerMessage {  // to a trainer
  uint64_t worker_id = 0;
  wire::ToTrainer head;
  std::optional<Content> content;
};
struct OrdersMessage {
  wire::WorkerOrders orders;
};
using Message = std::variant<WorkerMessage, TrainerMessage, wire::WorkerReport, OrdersMessage, wire::TrainerReport,
                             wire::TrainerRoster>;

using ProcessId = uint32_t;  // never used twice
constexpr ProcessId kController = 0;

// Thrown where something that must hold does not.
struct Violation {
  std::string text;
};

class World;

// The part that runs in one process. Its events are delivered while it is alive and not stalled.
class Process {
 public:
  Process(World& world, ProcessId id) : world_(world), id_(id) {}
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;
  virtual ~Process() = default;

  virtual void receive(ProcessId from, const Message& message) = 0;
  virtual void tick() = 0;
  virtual std::optional<Instant> next_tick() const = 0;
  virtual std::string name() const = 0;

  ProcessId id() const { return id_; }

  Instant stalled_until{};
  std::optional<Instant> wake_at;  // that is scheduled

 protected:
  World& world_;

 private:
  ProcessId id_;
};

class SimController;
class SimWorker;
class SimTrainer;

class World {
 public:
  World(const Scenario& scenario, std::ostream* trace);
  ~World();

  // The invariant that was violated, or nothing.
  std::optional<std::string> run();

  // ---- For the processes
  Instant now() const { return now_; }
  Random& random() { return random_; }
  const Scenario& scenario() const { return scenario_; }
  void send(ProcessId from, ProcessId to, Message message);
  // A connection that `from` has to `to` is made anew: messages on their way back are lost.
  void renew(ProcessId from, ProcessId to);
  void at(Instant when, ProcessId process, std::function<void()> action);
  template <typename... Parts>
  void say(const Parts&... parts) {
    if (trace_ == nullptr) return;
    *trace_ << std::chrono::duration<double>(now_.time_since_epoch()).count() << "  ";
    ((*trace_ << parts), ...);
    *trace_ << "\n";
  }
  ProcessId process_of_worker(uint64_t worker_id) const;
  std::vector<uint64_t> worker_ids() const;  // of all that there ever were
  bool is_intruder(uint64_t trainer_id) const { return intruders_.contains(trainer_id); }
  ProcessId process_of_trainer(uint64_t trainer_id) const;
  // A worker dies while it makes a batch, or the process does in which it makes it.
  void die_of(SimWorker& worker, uint32_t job, BatchKey key);
  void leave(SimWorker& worker);
  // A worker ends that was told to leave, whatever it is at. Trainers see the connection end.
  void close(SimWorker& worker);
  // The process ends in which a worker makes its batches.
  void end_process_of(SimWorker& worker);
  // For how long this batch takes longer than others; Duration::max() if for ever.
  std::optional<Duration> hang_of(SimWorker& worker, uint32_t job, BatchKey key);
  bool has_blame(uint32_t job, BatchKey key, uint32_t death_count) const;
  // The batch that kills, of the first job.
  std::optional<BatchKey> poison() const;
  // The one that kills or hangs, where there is one.
  BatchKey poison_key() const;
  // A number that no process had before.
  uint64_t new_identity() { return ++identities_; }

 private:
  struct Event {
    Instant at;
    uint64_t order;
    ProcessId process;
    bool is_worlds;  // happens to no process
    std::function<void()> action;
    bool operator<(const Event& other) const { return std::pair(at, order) > std::pair(other.at, other.order); }
  };

  void start();
  void plan_faults();
  void fault_at(Instant when, std::function<void()> action);
  void add_worker(uint32_t declined_jobs);
  uint32_t draw_declined_jobs();
  void add_trainer(uint32_t job, std::unique_ptr<SimTrainer> resumed_from);
  void add_intruder();
  void kill(ProcessId process, bool is_seen);
  void wake(Process& process);
  bool is_cut(ProcessId from, ProcessId to) const;
  bool is_done() const;
  bool is_settled() const;
  bool is_wanted(uint64_t trainer_id, BatchKey key) const;
  // Whether what hangs for ever may hold this trainer up.
  bool is_held_up(const SimTrainer& trainer) const;
  void check_progress() const;
  void check_hangs();
  bool is_hung_or_gone(uint64_t worker_id) const;
  bool is_stuck_unseen(const wire::WorkerReport& report) const;
  void check_credit() const;
  void check_sharing();
  void check_memory() const;
  double chance() { return std::uniform_real_distribution<double>(0, 1)(random_); }
  Duration between(Duration low, Duration high) {
    return Duration(std::uniform_int_distribution<int64_t>(low.count(), high.count())(random_));
  }
  ProcessId pick_process(bool (*wanted)(const Process&));

  Scenario scenario_;
  std::ostream* trace_;
  Random random_;
  Instant now_{};
  uint64_t event_count_ = 0;
  uint64_t identities_ = 0;
  ProcessId next_process_ = kController + 1;
  std::priority_queue<Event> events_;
  std::map<ProcessId, std::unique_ptr<Process>> processes_;
  std::map<uint64_t, ProcessId> workers_;                         // by worker id
  std::map<uint64_t, ProcessId> trainers_;                        // by trainer id
  std::set<uint64_t> intruders_;                                  // of them
  std::map<std::pair<ProcessId, ProcessId>, Instant> arrivals_;   // the last, in order
  std::map<std::pair<ProcessId, ProcessId>, Instant> cuts_;       // until when
  std::map<std::pair<ProcessId, ProcessId>, uint32_t> renewals_;  // of the way from the first to the second
  std::map<std::pair<uint32_t, BatchKey>, uint32_t> deaths_;
  uint32_t hangs_left_;
  struct Abandoned {
    std::pair<uint64_t, BatchKey> work;
    Instant since;
  };
  std::map<ProcessId, Abandoned> abandoned_;          // workers at batches that no trainer wants
  std::map<ProcessId, Instant> draining_;             // workers that are to leave, and since when
  std::map<uint64_t, int> wasted_;                    // workers, and how often in turn they were seen to be wasted
  std::vector<std::unique_ptr<SimTrainer>> resting_;  // crashed, until they resume
};

}  // namespace penstock::sim
