// SPDX-License-Identifier: Apache-2.0
#pragma once
// The controller: which workers and trainers there are, and which worker is whose. A pure state machine of reports and
// time. It is not on the way of any batch: while it is gone, trainers and workers go on as they are.
//
//   leases     a worker or trainer that has not reported for kLease is gone. A worker's incarnation is fenced by that:
//              it is on no roster any more, and is told so if it comes back; it may return as its next incarnation.
//   demand     of each trainer by scaling.h, from its reports
//   shares     so many for each job by allocation.h, for each of its ranks by rank_split.h, and which by share_out.h,
//   as
//              soon as anything changes. A worker that is to go to another trainer is withdrawn first from the one that
//              has it, and moves when it reports that it works for nobody. One that has declined a trainer goes to
//              others, and so does one that runs no jobs of its kind. One that is stuck at a batch that nobody wants
//              goes to nobody.
//   orders     tell each worker whom it may serve, so that shares and quotas are kept also by trainers that would not
//              keep them. A trainer that does not leave a withdrawn worker within kLeaveTime is parted from it. One
//              that does not report keeps its workers for so long, and after that until others have use for them.
//   bounds     no more than kPoolCountMax trainers, of which the user with most makes room for others, and no more
//              than kPoolCountMax workers, of which the machine with most does
//   settling   for kSettling after its start the controller only listens, and adopts what it hears of who works for
//              whom.

#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/instant.h"
#include "cluster/allocation.h"
#include "cluster/rank_split.h"
#include "cluster/recent_rates.h"
#include "cluster/scaling.h"
#include "cluster/share_out.h"
#include "wire/reports.h"

namespace penstock::cluster {

constexpr Duration kSettling = std::chrono::seconds(2);
constexpr size_t kFencedCountMax = 4096;  // incarnations that are remembered
constexpr size_t kPoolCountMax = 4096;    // workers of a pool, and trainers: a roster names no more
// For what a withdrawn worker has begun, which an honest trainer waits for.
constexpr Duration kLeaveTime = std::chrono::seconds(60);

// What an operator lays down for the jobs of one name, or for one user.
struct JobTerms {
  double priority = 1;              // that of the job times that of the user
  std::optional<uint32_t> quota{};  // the most workers of all their trainers
};

struct RosterOptions {
  AllocationPolicy policy = gpu_progress;
  double floor_share = kPoolFloorShare;
  double move_cost_s = kPoolMoveCostS;
  double horizon_s = kPoolHorizonS;
  std::map<std::string, JobTerms> terms{};  // by the job's name; jobs of two users are two jobs
  std::map<std::string, JobTerms> user_terms{};
};

// Whose connection a worker's reports come over, whatever they claim.
struct WorkerHolder {
  wire::PublicKeyBytes key{};
  std::string machine{};  // whose key that is; empty for that of the role
  std::string address{};  // of the connection's peer
};

// Thread-compatible.
class Roster {
 public:
  Roster(uint64_t controller_id, Instant now, RosterOptions options = {});

  // Whether there is room for one more worker of this holder that is not known. Where there is none, it must not
  // report. If need be, another machine gives way that has more of them: the one that came last of those that serve
  // nobody, or else of all, is forgotten. A machine is known by its key, and by its address where it has that of the
  // role.
  bool make_room_for_worker(const WorkerHolder& holder, Instant now);
  // The same for a trainer of this user.
  bool make_room_for_trainer(const std::string& user, Instant now);
  size_t count() const { return workers_.size() + trainers_.size(); }
  bool has_worker(uint64_t worker_id) const { return workers_.contains(worker_id); }
  bool has_trainer(uint64_t trainer_id) const { return trainers_.contains(trainer_id); }

  wire::WorkerOrders worker_reported(const wire::WorkerReport& report, Instant now, const WorkerHolder& holder = {});
  // `user` is the one whose key it shows; empty for a trainer with the role's key.
  wire::TrainerRoster trainer_reported(const wire::TrainerReport& report, Instant now, const std::string& user = {});
  // They leave by their own will, which fences nothing.
  void worker_left(uint64_t worker_id, Instant now);
  void trainer_left(uint64_t trainer_id, Instant now);
  // False where there is no such worker.
  bool drain(uint64_t worker_id, Instant now);

  void tick(Instant now);
  std::optional<Instant> next_tick() const;

  // Trainers whose roster has changed since it was last asked for.
  std::vector<uint64_t> changed_trainers() const;
  wire::TrainerRoster roster_of(uint64_t trainer_id);
  // By worker, the orders that have changed and that no answer to its reports has told it.
  std::map<uint64_t, wire::WorkerOrders> take_orders();

  struct WorkerStatus {
    wire::WorkerReport report;
    std::string machine{};
    uint64_t assigned_to = 0;  // trainer
    bool is_withdrawn = false;
    bool is_leaving = false;      // drains, or is to
    uint64_t assigned_order = 0;  // ever rising
    Duration since_report{};
  };
  struct TrainerStatus {
    wire::TrainerReport report;
    std::string user{};
    uint32_t worker_count = 0;
    Duration since_report{};
    Duration idle{};  // for how long it has had no use for workers; 0 while it has
    RecentRates rates{};
    uint32_t demand = 0;  // workers that it has use for; one of which nothing is measured counts for a first number
    JobLimit limit = JobLimit::kUnknown;
    std::optional<MeasuredWork> measured{};
    std::string reason{};  // of the demand
    uint64_t change_count = 0;
  };
  std::vector<WorkerStatus> workers(Instant now) const;
  std::vector<TrainerStatus> trainers(Instant now) const;
  // How many workers the trainers have use for, all together. One of which nothing is measured counts for kFirstDemand.
  // A loader that has less than half of the time of another one of its program, as one that validates, counts for no
  // more than that one: nothing is started for it.
  uint32_t wanted_worker_count() const;
  bool is_settled(Instant now) const { return now >= settled_at_; }
  uint64_t controller_id() const { return controller_id_; }
  uint64_t fenced_count() const { return fenced_total_; }
  // What was wrong with the policy's last answer, in the place of which workers are shared out evenly; or nothing.
  const std::string& policy_trouble() const { return policy_trouble_; }

 private:
  struct Worker {
    wire::WorkerReport report;
    WorkerHolder holder{};
    Instant reported_at{};
    uint64_t arrival = 0;     // ever rising
    uint64_t trainer_id = 0;  // that it is assigned to
    uint64_t assigned_order = 0;
    bool is_withdrawn = false;
    bool is_to_drain = false;
    uint64_t view = 0;                       // of its orders
    bool is_to_part = false;                 // from the trainer that it serves and that did not leave it
    bool is_stray = false;                   // it serves one that it was not given to, for kLeaveTime now
    std::optional<Instant> overstayed_at{};  // since when it serves one that is to leave it
    std::vector<uint64_t> unfit_for{};       // trainers that it has declined, or whose jobs it cannot run

    bool is_leaving() const { return is_to_drain || report.is_draining; }
    // Whether it may be given to trainers.
    bool is_of_use() const { return !is_leaving() && !report.is_stuck(); }
    AssignedWorker hand() const;  // valid until the worker changes
  };
  struct Trainer {
    wire::TrainerReport report;
    std::string user{};
    Instant reported_at{};
    Instant wanted_at{};   // when it last had a use for workers
    uint64_t arrival = 0;  // ever rising
    RecentRates rates{};
    JobScaler scaler{std::numeric_limits<uint32_t>::max()};  // who there is may as well be used
    uint64_t view = 0;
    bool has_changed = false;
  };

  uint32_t counted_demand(const Trainer& trainer) const;
  void balance(Instant now);
  void share_out_workers();
  // The trainers of each job: all of its ranks that report, or the only one.
  std::vector<std::vector<uint64_t>> jobs() const;
  // What a rank has and has use for.
  RankClaim rank_claim(uint64_t trainer_id) const;
  // Of a job whose ranks make these claims, in a pool of so many workers.
  JobClaim job_claim(std::span<const uint64_t> trainer_ids, std::span<const RankClaim> ranks, uint32_t worker_count_max,
                     AllocationOptions& options) const;
  // How many workers each trainer is to have.
  std::map<uint64_t, uint32_t> allocate();
  // Sets the claim's priority and owners, and their quotas.
  void apply_terms(const Trainer& trainer, JobClaim& claim, AllocationOptions& options) const;
  // Whether the worker can run the trainer's job, as far as the reports tell.
  bool is_fit(const Worker& worker, uint64_t trainer_id) const;
  void add_mismatches(const wire::TrainerReport& trainer, wire::TrainerRoster& roster) const;
  uint32_t count_of_workers(uint64_t trainer_id) const;
  void assign(Worker& worker, uint64_t trainer_id);
  void withdraw(Worker& worker);
  void release(Worker& worker);
  void note_change(uint64_t trainer_id);
  void note_orders(Worker& worker);
  wire::WorkerOrders orders_for(const Worker& worker) const;
  // Sees to a trainer that stays with the worker although it is to leave it.
  void end_overstay(Worker& worker, Instant now);
  void fence(uint64_t worker_id, uint32_t incarnation);
  void drop_worker(std::map<uint64_t, Worker>::iterator worker);

  uint64_t controller_id_;
  RosterOptions options_;
  std::string policy_trouble_;  // what was wrong with the policy's last answer
  Instant settled_at_;
  bool was_settled_ = false;
  std::map<uint64_t, Worker> workers_;
  std::map<uint64_t, Trainer> trainers_;
  std::map<uint64_t, uint32_t> fenced_;  // the last incarnation, by worker id
  std::deque<uint64_t> fenced_order_;
  uint64_t fenced_total_ = 0;
  uint64_t assigned_count_ = 0;
  uint64_t view_count_ = 0;
  uint64_t arrival_count_ = 0;
  std::set<uint64_t> ordered_;  // workers whose orders have changed
  bool is_balanced_ = false;    // nothing has changed since that was last seen to
};

}  // namespace penstock::cluster
