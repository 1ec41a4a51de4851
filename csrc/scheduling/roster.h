// SPDX-License-Identifier: Apache-2.0
#pragma once
// Roster, the decisions of a pool's controller: the workers and trainers that exist, and the assignment of workers to
// trainers. RecentRates are the rates at which a trainer receives batches. Pure.

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "scheduling/allocation.h"
#include "scheduling/scaling.h"
#include "scheduling/share_out.h"
#include "wire/reports.h"

namespace penstock::scheduling {

constexpr Duration kRateWindow = std::chrono::seconds(10);
// Reports that arrive more often than this are not all kept, which limits how many a trainer can cause to be kept.
constexpr Duration kRateStep = std::chrono::milliseconds(250);
// A rate over a shorter time would cover only a few batches.
constexpr Duration kRateSpanMin = std::chrono::seconds(1);

// How many batches per second a trainer received recently, and the share of that time in which it waited for them. A
// trainer reports totals; the rates cover the reports within the last kRateWindow. Thread-compatible.
class RecentRates {
 public:
  void note(const wire::QueueSignal& queue, Instant now) {
    const Sample sample{.at = now, .delivered_batches = queue.delivered_batches, .waited_ns = queue.waited_ns};
    if (!samples_.empty() &&
        (sample.delivered_batches < latest_.delivered_batches || sample.waited_ns < latest_.waited_ns))
      samples_.clear();  // the counters were reset
    latest_ = sample;
    if (samples_.empty() || now - samples_.back().at >= kRateStep) samples_.push_back(sample);
    while (now - samples_.front().at > kRateWindow) samples_.pop_front();
  }

  // Nullopt until the reports cover kRateSpanMin.
  std::optional<double> batches_per_s() const {
    if (span() < kRateSpanMin) return std::nullopt;
    return static_cast<double>(latest_.delivered_batches - samples_.front().delivered_batches) / seconds(span());
  }
  // The share of the time in which the trainer waited for batches, from 0 to 1. Nullopt as above.
  std::optional<double> waited_share() const {
    if (span() < kRateSpanMin) return std::nullopt;
    const double waited_s = static_cast<double>(latest_.waited_ns - samples_.front().waited_ns) / 1e9;
    return std::min(1.0, waited_s / seconds(span()));
  }

 private:
  struct Sample {
    Instant at{};
    uint64_t delivered_batches = 0;
    uint64_t waited_ns = 0;
  };

  static double seconds(Duration time) { return std::chrono::duration<double>(time).count(); }
  Duration span() const { return samples_.empty() ? Duration{} : latest_.at - samples_.front().at; }

  std::deque<Sample> samples_;  // oldest first; at most kRateWindow / kRateStep + 2
  Sample latest_{};
};

constexpr Duration kSettling = std::chrono::seconds(2);
constexpr size_t kFencedCountMax = 4096;  // incarnations that are remembered
constexpr size_t kPoolCountMax = 4096;    // workers of a pool, and trainers: the limit of a roster
// The time for a withdrawn worker's current batch, for which an honest trainer waits.
constexpr Duration kLeaveTime = std::chrono::seconds(60);

// An operator's settings for the jobs of one name, or for one user.
struct JobTerms {
  double priority = 1;              // the job's priority times the user's
  std::optional<uint32_t> quota{};  // maximum number of workers of all their trainers
};

// A worker or a trainer that has joined the pool or left it, for the controller's log.
struct MemberEvent {
  bool is_worker = false;
  uint64_t id = 0;
  bool has_joined = false;
  bool is_failure = false;  // it has left without announcing it
  // What it reports about itself when it joins, else why it has left. Contains text that other processes have chosen.
  std::string text{};
};
constexpr size_t kMemberEventsMax = 1024;  // that nobody has taken; then the oldest are dropped

struct RosterOptions {
  AllocationPolicy policy = gpu_progress;
  double floor_share = kPoolFloorShare;
  double move_cost_s = kPoolMoveCostS;
  double horizon_s = kPoolHorizonS;
  std::map<std::string, JobTerms> terms{};  // by job name; jobs of different users are different jobs
  std::map<std::string, JobTerms> user_terms{};
  uint64_t keep_bytes = 0;  // of batches that the pool keeps for further requests, in equal shares at all workers
};

// The owner of the connection from which a worker's reports arrive, independent of their content.
struct WorkerHolder {
  wire::PublicKeyBytes key{};
  std::string machine{};  // whose key that is; empty for the role's key
  std::string address{};  // of the connection's peer
};

// A state machine of reports and time. No batch passes through the controller: while it is gone, trainers and workers
// continue as they are.
//
//   leases     a worker or trainer that has not reported for kLease is gone. This fences a worker's incarnation: it is
//              on no roster any more, and is notified if it reports again; it may return as its next incarnation.
//   demand     of each trainer by scaling.h, from its reports
//   shares     per job by allocation.h, per rank of a job and as individual workers by share_out.h, after every change.
//              A worker that is to move to another trainer is first withdrawn from its current one, and moves when it
//              reports that it works for no trainer. A worker that has declined a trainer, or that does not run jobs of
//              its kind, is assigned to others. A worker that is stuck at an unwanted batch is assigned to no trainer.
//   orders     inform each worker of the trainer that it may serve, so that shares and quotas are enforced even for
//              trainers that would exceed them. A trainer that does not leave a withdrawn worker within kLeaveTime is
//              separated from it. A trainer that does not report keeps its workers for that long, and after that until
//              others can use them.
//   bounds     at most kPoolCountMax trainers, where the user with the most makes room for others, and at most
//              kPoolCountMax workers, where the machine with the most does
//   settling   for kSettling after its start the controller only listens, and takes over the assignments that are
//              reported to it.
//
// Thread-compatible.
class Roster {
 public:
  Roster(uint64_t controller_id, Instant now, RosterOptions options = {});

  // Whether there is room for one more unknown worker of this holder. If there is none, it must not report. If
  // necessary, another machine that has more workers makes room: among its workers without a trainer, or else among all
  // of them, the last one to arrive is forgotten. A machine is identified by its key, or by its address if it has the
  // role's key.
  bool make_room_for_worker(const WorkerHolder& holder, Instant now);
  // The same for a trainer of this user.
  bool make_room_for_trainer(const std::string& user, Instant now);
  size_t count() const { return workers_.size() + trainers_.size(); }
  bool has_worker(uint64_t worker_id) const { return workers_.contains(worker_id); }
  bool has_trainer(uint64_t trainer_id) const { return trainers_.contains(trainer_id); }

  wire::WorkerOrders worker_reported(const wire::WorkerReport& report, Instant now, const WorkerHolder& holder = {});
  // `user` is the user whose key the trainer uses; empty for the role's key.
  wire::TrainerRoster trainer_reported(const wire::TrainerReport& report, Instant now, const std::string& user = {});
  // Announced departures, which do not fence an incarnation.
  void worker_left(uint64_t worker_id, Instant now);
  void trainer_left(uint64_t trainer_id, Instant now);
  // Returns false if there is no such worker.
  bool drain(uint64_t worker_id, Instant now);

  void tick(Instant now);
  std::optional<Instant> next_tick() const;

  // Trainers whose roster has changed since the last call of roster_of().
  std::vector<uint64_t> changed_trainers() const;
  wire::TrainerRoster roster_of(uint64_t trainer_id);
  // By worker, the changed orders that it has not received with an answer to its reports.
  std::map<uint64_t, wire::WorkerOrders> take_orders();
  // The members that have joined or left since the last call, oldest first.
  std::vector<MemberEvent> take_events();

  struct WorkerStatus {
    wire::WorkerReport report;
    std::string machine{};
    uint64_t assigned_to = 0;  // trainer
    bool is_withdrawn = false;
    bool is_leaving = false;      // drains, or has to
    uint64_t assigned_order = 0;  // increasing
    Duration since_report{};
  };
  struct TrainerStatus {
    wire::TrainerReport report;
    std::string user{};
    uint32_t worker_count = 0;
    Duration since_report{};
    Duration idle{};  // how long it has not needed workers; 0 while it does
    RecentRates rates{};
    uint32_t demand = 0;  // workers that it can use; a trainer without measurements counts for an initial number
    JobLimit limit = JobLimit::kUnknown;
    std::optional<MeasuredWork> measured{};
    std::string reason{};  // for the demand
    uint64_t change_count = 0;
  };
  std::vector<WorkerStatus> workers(Instant now) const;
  std::vector<TrainerStatus> trainers(Instant now) const;
  // The number of workers that all trainers can use. A trainer without measurements counts for kFirstDemand. A loader
  // with at most half of the training time of another loader of its program, for example a validation loader, counts
  // for at most the demand of the other: no workers are started for it.
  uint32_t wanted_worker_count() const;
  bool is_settled(Instant now) const { return now >= settled_at_; }
  uint64_t controller_id() const { return controller_id_; }
  uint64_t fenced_count() const { return fenced_total_; }
  // The error in the policy's last answer, because of which workers are shared out evenly; empty if there was none.
  const std::string& policy_trouble() const { return policy_trouble_; }

 private:
  struct Worker {
    wire::WorkerReport report;
    WorkerHolder holder{};
    Instant reported_at{};
    uint64_t arrival = 0;     // increasing
    uint64_t trainer_id = 0;  // the assigned trainer
    uint64_t assigned_order = 0;
    bool is_withdrawn = false;
    bool is_to_drain = false;
    uint64_t view = 0;                       // of its orders
    bool is_to_part = false;                 // from the trainer that it serves and that did not leave it
    bool is_stray = false;                   // it has served a trainer that it is not assigned to for kLeaveTime
    std::optional<Instant> overstayed_at{};  // since when it has served a trainer that has to leave it
    std::vector<uint64_t> unfit_for{};       // trainers that it has declined, or whose jobs it cannot run

    bool is_leaving() const { return is_to_drain || report.is_draining; }
    // Whether it may be assigned to trainers.
    bool is_of_use() const { return !is_leaving() && !report.is_stuck(); }
    AssignedWorker hand() const;  // valid until the worker changes
  };
  struct Trainer {
    wire::TrainerReport report;
    std::string user{};
    Instant reported_at{};
    Instant wanted_at{};   // when it last needed workers
    uint64_t arrival = 0;  // increasing
    RecentRates rates{};
    JobScaler scaler{std::numeric_limits<uint32_t>::max()};  // available workers may as well be used
    uint64_t view = 0;
    bool has_changed = false;
  };

  uint32_t counted_demand(const Trainer& trainer) const;
  void balance(Instant now);
  void share_out_workers();
  // The trainers of each job: all of its ranks that report, or the only one.
  std::vector<std::vector<uint64_t>> jobs() const;
  // A rank's current workers and the number that it can use.
  RankClaim rank_claim(uint64_t trainer_id) const;
  // The claim of a job whose ranks make these claims, in a pool of `worker_count_max` workers.
  JobClaim job_claim(std::span<const uint64_t> trainer_ids, std::span<const RankClaim> ranks, uint32_t worker_count_max,
                     AllocationOptions& options) const;
  // The number of workers for each trainer.
  std::map<uint64_t, uint32_t> allocate();
  // Sets the claim's priority and owners, and the owners' quotas.
  void apply_terms(const Trainer& trainer, JobClaim& claim, AllocationOptions& options) const;
  // Whether the worker can run the trainer's job, as far as the reports show.
  bool is_fit(const Worker& worker, uint64_t trainer_id) const;
  void add_mismatches(const wire::TrainerReport& trainer, wire::TrainerRoster& roster) const;
  uint32_t count_of_workers(uint64_t trainer_id) const;
  void assign(Worker& worker, uint64_t trainer_id);
  void withdraw(Worker& worker);
  void release(Worker& worker);
  void note_change(uint64_t trainer_id);
  void note_orders(Worker& worker);
  wire::WorkerOrders orders_for(const Worker& worker) const;
  // Handles a trainer that stays with the worker although it has to leave it.
  void end_overstay(Worker& worker, Instant now);
  void fence(uint64_t worker_id, uint32_t incarnation);
  void drop_worker(std::map<uint64_t, Worker>::iterator worker, std::string reason, bool is_failure = false);
  void drop_trainer(std::map<uint64_t, Trainer>::iterator trainer, const std::string& reason, bool is_failure = false);
  void note_event(MemberEvent event);

  uint64_t controller_id_;
  RosterOptions options_;
  std::string policy_trouble_;  // the error in the policy's last answer
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
  bool is_balanced_ = false;    // no changes since the last balance
  std::deque<MemberEvent> events_;
};

}  // namespace penstock::scheduling
