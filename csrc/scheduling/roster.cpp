// SPDX-License-Identifier: Apache-2.0
#include "scheduling/roster.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <iterator>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "session/worker_session.h"

namespace penstock::scheduling {
namespace {

std::string torch_text(uint16_t torch) { return std::to_string(torch >> 8) + "." + std::to_string(torch & 255); }

bool runs_kind(const wire::WorkerReport& worker, const wire::TrainerReport& trainer) {
  return (worker.job_kinds & wire::kind_bit(trainer.job_kind)) != 0;
}

// An unreported torch version counts as a match.
bool has_its_torch(const wire::WorkerReport& worker, const wire::TrainerReport& trainer) {
  return worker.torch == 0 || trainer.torch == 0 || worker.torch == trainer.torch;
}

// The reason why the worker cannot run the trainer's job, as far as the two reports show; empty if there is none.
std::string mismatch(const wire::WorkerReport& worker, const wire::TrainerReport& trainer) {
  if (!runs_kind(worker, trainer)) {
    return trainer.job_kind == wire::JobKind::kPlugin
               ? "it runs Python, but the dataset is a plug-in; start penstock-worker for it"
               : "it runs only plug-ins, but the dataset is a Python object; start `penstock worker` for it";
  }
  if (!has_its_torch(worker, trainer)) {
    return "it has torch " + torch_text(worker.torch) + ", but the job uses torch " + torch_text(trainer.torch) +
           "; install the same version on both";
  }
  return "";
}

std::string silence_text() {
  const auto lease = std::chrono::duration_cast<std::chrono::milliseconds>(session::kLease);
  return "no report for " + std::to_string(lease.count()) + " ms";
}

// A worker's location, for dividing the places of a pool.
std::string place_of(const WorkerHolder& holder) {
  return holder.machine.empty() ? "at " + holder.address : "of " + holder.machine;
}

}  // namespace

Roster::Roster(uint64_t controller_id, Instant now, RosterOptions options)
    : controller_id_(controller_id), options_(std::move(options)), settled_at_(now + kSettling) {}

// ---- Reports

wire::WorkerOrders Roster::worker_reported(const wire::WorkerReport& report, Instant now, const WorkerHolder& holder) {
  wire::WorkerOrders orders{.incarnation = report.incarnation};
  const auto fenced = fenced_.find(report.worker_id);
  if (fenced != fenced_.end() && report.incarnation <= fenced->second) {
    orders.is_fenced = true;
    return orders;
  }
  if (const auto known = workers_.find(report.worker_id);
      known != workers_.end() && known->second.report.incarnation != report.incarnation) {
    if (report.incarnation < known->second.report.incarnation) {  // a delayed report
      orders.is_fenced = true;
      return orders;
    }
    drop_worker(known, "it has lost its connection, and continues as its next incarnation");
  }
  const bool is_new = !workers_.contains(report.worker_id);
  if (is_new) is_balanced_ = false;
  Worker& worker = workers_[report.worker_id];
  if (is_new) {
    worker.view = ++view_count_;  // greater than all before, as the worker may have been here and lost its lease
    worker.arrival = ++arrival_count_;
    note_event({.is_worker = true, .id = report.worker_id, .has_joined = true, .text = report.about});
  }
  const bool has_moved = worker.report.endpoint != report.endpoint || worker.holder.key != holder.key;
  for (const uint64_t trainer_id : report.declined)
    if (!worker.report.has_declined(trainer_id)) note_change(trainer_id);
  const auto standing = [](const wire::WorkerReport& r) { return std::tie(r.is_draining, r.trainer_id, r.declined); };
  if (standing(worker.report) != standing(report) || worker.report.is_stuck() != report.is_stuck())
    is_balanced_ = false;
  worker.report = report;
  worker.holder = holder;
  worker.reported_at = now;
  if (report.trainer_id == 0) worker.is_to_part = false;
  const bool is_to_go = worker.is_withdrawn || !is_fit(worker, worker.trainer_id);
  if (worker.trainer_id == 0 && trainers_.contains(report.trainer_id) && !worker.is_to_part) {
    assign(worker, report.trainer_id);
  } else if (is_to_go && report.trainer_id != worker.trainer_id) {
    release(worker);
  } else if (has_moved) {
    note_change(worker.trainer_id);
  }
  balance(now);
  ordered_.erase(report.worker_id);
  return orders_for(worker);
}

wire::TrainerRoster Roster::trainer_reported(const wire::TrainerReport& report, Instant now, const std::string& user) {
  const bool is_new = !trainers_.contains(report.trainer_id);
  Trainer& trainer = trainers_[report.trainer_id];
  if (is_new || trainer.report.worker_count_max != report.worker_count_max) is_balanced_ = false;
  trainer.report = report;
  trainer.user = user;
  trainer.reported_at = now;
  if (is_new || report.worker_count_max > 0) trainer.wanted_at = now;
  trainer.rates.note(report.queue, now);
  const uint64_t measurements_before = trainer.scaler.measurement_count();
  trainer.scaler.note(report, count_of_workers(report.trainer_id), now);
  if (trainer.scaler.measurement_count() != measurements_before) is_balanced_ = false;
  if (is_new) {
    trainer.view = ++view_count_;  // greater than all before, as the trainer may have been here and lost its lease
    trainer.arrival = ++arrival_count_;
    const std::string owner = user.empty() ? "" : " of the user " + user;
    note_event({.id = report.trainer_id, .has_joined = true, .text = report.job + owner + "; " + report.about});
    for (auto& [worker_id, worker] : workers_)
      if (worker.trainer_id == 0 && worker.report.trainer_id == report.trainer_id && !worker.is_to_part)
        assign(worker, report.trainer_id);
  }
  balance(now);
  return roster_of(report.trainer_id);
}

void Roster::worker_left(uint64_t worker_id, Instant now) {
  const auto found = workers_.find(worker_id);
  if (found == workers_.end()) return;
  const bool was_asked = found->second.is_to_drain;
  drop_worker(found, was_asked                    ? "it was drained on request"
                     : found->second.is_leaving() ? "it was drained"
                                                  : "it ended");
  balance(now);
}

void Roster::trainer_left(uint64_t trainer_id, Instant now) {
  const auto found = trainers_.find(trainer_id);
  if (found == trainers_.end()) return;
  drop_trainer(found, "it ended");
  balance(now);
}

bool Roster::make_room_for_worker(const WorkerHolder& holder, Instant now) {
  if (workers_.size() < kPoolCountMax) return true;
  std::map<std::string, size_t> counts;
  for (const auto& [worker_id, worker] : workers_) ++counts[place_of(worker.holder)];
  const auto most =
      std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  if (counts[place_of(holder)] >= most->second) return false;
  const auto worth = [&](const auto& item) {  // the one with the least worth is removed first
    return std::tuple(place_of(item.second.holder) != most->first, item.second.trainer_id != 0, ~item.second.arrival);
  };
  const auto least = std::min_element(workers_.begin(), workers_.end(),
                                      [&](const auto& a, const auto& b) { return worth(a) < worth(b); });
  drop_worker(least, "the pool is full, and its machine has the most workers", true);
  balance(now);
  return true;
}

bool Roster::make_room_for_trainer(const std::string& user, Instant now) {
  if (trainers_.size() < kPoolCountMax) return true;
  std::map<std::string, size_t> counts;
  for (const auto& [trainer_id, trainer] : trainers_) ++counts[trainer.user];
  const auto most =
      std::max_element(counts.begin(), counts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  if (counts[user] >= most->second) return false;
  std::set<uint64_t> served;
  for (const auto& [worker_id, worker] : workers_) served.insert(worker.trainer_id);
  const auto worth = [&](const auto& item) {  // the one with the least worth is removed first
    return std::tuple(item.second.user != most->first, served.contains(item.first), ~item.second.arrival);
  };
  const auto least = std::min_element(trainers_.begin(), trainers_.end(),
                                      [&](const auto& a, const auto& b) { return worth(a) < worth(b); });
  drop_trainer(least, "the pool is full, and its user has the most trainers", true);
  balance(now);
  return true;
}

bool Roster::drain(uint64_t worker_id, Instant now) {
  const auto found = workers_.find(worker_id);
  if (found == workers_.end()) return false;
  found->second.is_to_drain = true;
  note_orders(found->second);
  is_balanced_ = false;
  balance(now);
  return true;
}

// ---- Time

void Roster::tick(Instant now) {
  for (auto at = workers_.begin(); at != workers_.end();) {
    const auto worker = at++;
    if (now - worker->second.reported_at < session::kLease) continue;
    fence(worker->first, worker->second.report.incarnation);
    drop_worker(worker, silence_text(), true);
  }
  for (auto& [worker_id, worker] : workers_) end_overstay(worker, now);
  for (auto at = trainers_.begin(); at != trainers_.end();) {
    const auto trainer = at++;
    if (now - trainer->second.reported_at >= session::kLease) drop_trainer(trainer, silence_text(), true);
  }
  balance(now);
}

std::optional<Instant> Roster::next_tick() const {
  std::optional<Instant> next;
  for (const auto& [worker_id, worker] : workers_) next = earlier(next, worker.reported_at + session::kLease);
  for (const auto& [trainer_id, trainer] : trainers_) next = earlier(next, trainer.reported_at + session::kLease);
  if (!was_settled_) next = earlier(next, settled_at_);
  return next;
}

// ---- Assignment of workers to trainers

void Roster::balance(Instant now) {
  if (is_balanced_ && was_settled_) return;
  for (auto& [worker_id, worker] : workers_)
    if (worker.trainer_id != 0 && !trainers_.contains(worker.trainer_id)) release(worker);
  if (!is_settled(now)) return;
  if (!was_settled_) {
    was_settled_ = true;
    for (auto& [trainer_id, trainer] : trainers_) note_change(trainer_id);
    for (auto& [worker_id, worker] : workers_) note_orders(worker);
  }

  share_out_workers();
  is_balanced_ = true;
}

bool Roster::is_fit(const Worker& worker, uint64_t trainer_id) const {
  if (worker.report.has_declined(trainer_id)) return false;
  const auto found = trainers_.find(trainer_id);
  if (found == trainers_.end()) return true;
  const wire::TrainerReport& trainer = found->second.report;
  return runs_kind(worker.report, trainer) && has_its_torch(worker.report, trainer);
}

uint32_t Roster::count_of_workers(uint64_t trainer_id) const {
  return static_cast<uint32_t>(std::count_if(workers_.begin(), workers_.end(), [trainer_id](const auto& item) {
    return item.second.trainer_id == trainer_id && !item.second.is_withdrawn;
  }));
}

void Roster::apply_terms(const Trainer& trainer, JobClaim& claim, AllocationOptions& options) const {
  const auto apply = [&](const std::map<std::string, JobTerms>& terms, const std::string& name, std::string owner) {
    const auto found = terms.find(name);
    if (found == terms.end()) return;
    claim.priority *= found->second.priority;
    if (!found->second.quota) return;
    options.quotas[owner] = *found->second.quota;
    claim.owners.push_back(std::move(owner));
  };
  const std::string of_user = trainer.user.empty() ? "" : " of the user " + trainer.user;
  apply(options_.terms, trainer.report.job, "the job " + trainer.report.job + of_user);
  if (!trainer.user.empty()) apply(options_.user_terms, trainer.user, "the user " + trainer.user);
}

std::vector<std::vector<uint64_t>> Roster::jobs() const {
  std::vector<std::vector<uint64_t>> jobs;
  std::map<std::pair<std::string, uint64_t>, size_t> places;  // a user cannot join another user's job
  for (const auto& [trainer_id, trainer] : trainers_) {
    const uint64_t group = trainer.report.job_rank.group;
    const auto [place, is_new] =
        group == 0 ? std::pair(places.end(), true) : places.try_emplace({trainer.user, group}, jobs.size());
    if (is_new)
      jobs.push_back({trainer_id});
    else
      jobs[place->second].push_back(trainer_id);
  }
  return jobs;
}

RankClaim Roster::rank_claim(uint64_t trainer_id) const {
  const JobScaler& scaler = trainers_.at(trainer_id).scaler;
  const auto able_count = std::count_if(workers_.begin(), workers_.end(), [&](const auto& item) {
    return item.second.is_of_use() && is_fit(item.second, trainer_id);
  });
  return {.worker_count = count_of_workers(trainer_id),
          .worker_count_max = std::min(scaler.demand(), static_cast<uint32_t>(able_count)),
          .progress = [&scaler](uint32_t count) { return scaler.progress(count); }};
}

JobClaim Roster::job_claim(std::span<const uint64_t> trainer_ids, std::span<const RankClaim> ranks,
                           uint32_t worker_count_max, AllocationOptions& options) const {
  JobClaim claim{.job_id = trainer_ids.front(), .floor_max = 0};
  claim.user = trainers_.at(trainer_ids.front()).user;
  claim.keeps_one = true;
  double busy_rank_count = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    claim.worker_count += ranks[rank].worker_count;
    claim.floor_max += trainers_.at(trainer_ids[rank]).scaler.busy_count();
    busy_rank_count += ranks[rank].worker_count_max > 0 ? 1 : 0;
  }
  claim.gpus = std::max(1.0, busy_rank_count);
  claim.progress = job_progress(ranks, worker_count_max);
  apply_terms(trainers_.at(trainer_ids.front()), claim, options);
  return claim;
}

std::map<uint64_t, uint32_t> Roster::allocate() {
  uint32_t pool_count = 0;
  for (const auto& [worker_id, worker] : workers_) pool_count += worker.is_of_use() ? 1 : 0;
  AllocationOptions options{
      .floor_share = options_.floor_share, .move_cost_s = options_.move_cost_s, .horizon_s = options_.horizon_s};
  const std::vector<std::vector<uint64_t>> jobs = this->jobs();
  std::vector<std::vector<RankClaim>> ranks(jobs.size());  // by job
  std::vector<JobClaim> claims;
  claims.reserve(jobs.size());
  for (size_t job = 0; job < jobs.size(); ++job) {
    ranks[job].reserve(jobs[job].size());
    for (const uint64_t trainer_id : jobs[job]) ranks[job].push_back(rank_claim(trainer_id));
    claims.push_back(job_claim(jobs[job], ranks[job], pool_count, options));
  }
  std::vector<uint32_t> counts;
  std::optional<std::string> trouble;
  try {
    counts = options_.policy(claims, pool_count, options);
    trouble = check_allocation(claims, pool_count, options, counts);
  } catch (const std::exception& error) {  // a user-defined policy
    trouble = error.what();
  }
  policy_trouble_ = trouble.value_or("");
  if (trouble) counts = max_min(claims, pool_count, options);
  std::map<uint64_t, uint32_t> count_of;
  for (size_t job = 0; job < jobs.size(); ++job) {
    const std::vector<uint32_t> shares = split_among_ranks(ranks[job], counts[job]);
    for (size_t rank = 0; rank < shares.size(); ++rank) count_of[jobs[job][rank]] = shares[rank];
  }
  return count_of;
}

void Roster::share_out_workers() {
  // First of all, because a job keeps its workers, and an unusable worker does not count.
  for (auto& [worker_id, worker] : workers_)
    if (!worker.is_of_use()) withdraw(worker);
  std::vector<Demand> demands;
  for (const auto& [trainer_id, count] : allocate())
    demands.push_back({.trainer_id = trainer_id, .worker_count_max = count});
  std::vector<Worker*> workers;
  std::vector<AssignedWorker> hands;
  for (auto& [worker_id, worker] : workers_) {
    if (!worker.is_of_use()) continue;
    worker.unfit_for.clear();
    for (const auto& [trainer_id, trainer] : trainers_)
      if (!is_fit(worker, trainer_id)) worker.unfit_for.push_back(trainer_id);
    workers.push_back(&worker);
    hands.push_back(worker.hand());
  }
  for (const Move& move : share_out(demands, hands)) {
    if (move.trainer_id != 0)
      assign(*workers[move.hand], move.trainer_id);
    else
      withdraw(*workers[move.hand]);
  }
}

AssignedWorker Roster::Worker::hand() const {
  using State = AssignedWorker::State;
  const bool is_free = trainer_id == 0 && report.trainer_id == 0;
  const bool is_held = trainer_id != 0 && !is_withdrawn;
  return {.state = is_free                       ? State::kFree
                   : is_held                     ? State::kHeld
                   : trainer_id == 0 && is_stray ? State::kStray
                                                 : State::kMoving,
          .trainer_id = trainer_id,
          .given_order = assigned_order,
          .declined = unfit_for};
}

void Roster::assign(Worker& worker, uint64_t trainer_id) {
  is_balanced_ = false;
  worker.trainer_id = trainer_id;
  worker.is_withdrawn = false;
  worker.assigned_order = ++assigned_count_;
  note_change(trainer_id);
  note_orders(worker);
}

void Roster::withdraw(Worker& worker) {
  if (worker.trainer_id == 0 || worker.is_withdrawn) return;
  worker.is_withdrawn = true;
  note_change(worker.trainer_id);
}

void Roster::release(Worker& worker) {
  is_balanced_ = false;
  note_change(worker.trainer_id);
  worker.trainer_id = 0;
  worker.is_withdrawn = false;
  note_orders(worker);
}

std::vector<MemberEvent> Roster::take_events() {
  std::vector<MemberEvent> taken(std::make_move_iterator(events_.begin()), std::make_move_iterator(events_.end()));
  events_.clear();
  return taken;
}

void Roster::note_event(MemberEvent event) {
  events_.push_back(std::move(event));
  if (events_.size() > kMemberEventsMax) events_.pop_front();
}

void Roster::drop_trainer(std::map<uint64_t, Trainer>::iterator trainer, const std::string& reason, bool is_failure) {
  const uint64_t batch_count = trainer->second.report.queue.delivered_batches;
  note_event({.id = trainer->first,
              .is_failure = is_failure,
              .text = reason + ", after " + std::to_string(batch_count) + " batches"});
  is_balanced_ = false;
  trainers_.erase(trainer);
}

void Roster::drop_worker(std::map<uint64_t, Worker>::iterator worker, std::string reason, bool is_failure) {
  note_event({.is_worker = true, .id = worker->first, .is_failure = is_failure, .text = std::move(reason)});
  is_balanced_ = false;
  note_change(worker->second.trainer_id);
  ordered_.erase(worker->first);
  workers_.erase(worker);
}

void Roster::end_overstay(Worker& worker, Instant now) {
  const uint64_t served_id = worker.report.trainer_id;
  // A worker that drains is of no use to other trainers, and finishes its batch.
  const bool is_to_leave = worker.is_withdrawn || served_id != worker.trainer_id;
  const bool overstays = served_id != 0 && is_to_leave && !worker.is_leaving();
  if (!overstays) {
    worker.overstayed_at.reset();
    worker.is_stray = false;
    return;
  }
  if (!worker.overstayed_at) worker.overstayed_at = now;
  if (now - *worker.overstayed_at < kLeaveTime) return;
  if (worker.is_withdrawn) {
    worker.is_to_part = true;
    release(worker);
  } else if (!worker.is_stray) {
    worker.is_stray = true;
    is_balanced_ = false;
  }
}

void Roster::note_orders(Worker& worker) {
  worker.view = ++view_count_;
  ordered_.insert(worker.report.worker_id);
}

wire::WorkerOrders Roster::orders_for(const Worker& worker) const {
  return {.incarnation = worker.report.incarnation,
          .is_to_drain = worker.is_to_drain,
          .controller_id = controller_id_,
          .view = worker.view,
          .is_settled = was_settled_,
          .trainer_id = worker.trainer_id,
          .is_to_part = worker.is_to_part || worker.trainer_id != 0,
          .keep_bytes = options_.keep_bytes / std::max<uint64_t>(1, workers_.size())};
}

std::map<uint64_t, wire::WorkerOrders> Roster::take_orders() {
  std::map<uint64_t, wire::WorkerOrders> orders;
  for (const uint64_t worker_id : std::exchange(ordered_, {}))
    orders.emplace(worker_id, orders_for(workers_.at(worker_id)));
  return orders;
}

void Roster::note_change(uint64_t trainer_id) {
  const auto found = trainers_.find(trainer_id);
  if (found == trainers_.end()) return;
  found->second.view = ++view_count_;
  found->second.has_changed = true;
}

void Roster::fence(uint64_t worker_id, uint32_t incarnation) {
  ++fenced_total_;
  if (!fenced_.contains(worker_id)) fenced_order_.push_back(worker_id);
  fenced_[worker_id] = incarnation;
  if (fenced_order_.size() > kFencedCountMax) {
    fenced_.erase(fenced_order_.front());
    fenced_order_.pop_front();
  }
}

// ---- Answers

std::vector<uint64_t> Roster::changed_trainers() const {
  std::vector<uint64_t> changed;
  for (const auto& [trainer_id, trainer] : trainers_)
    if (trainer.has_changed) changed.push_back(trainer_id);
  return changed;
}

wire::TrainerRoster Roster::roster_of(uint64_t trainer_id) {
  wire::TrainerRoster roster{.controller_id = controller_id_, .is_settled = was_settled_};
  const auto found = trainers_.find(trainer_id);
  if (found == trainers_.end()) return roster;
  found->second.has_changed = false;
  roster.view = found->second.view;
  for (const auto& [worker_id, worker] : workers_) {
    if (!worker.is_leaving()) ++roster.pool_count;
    if (!worker.is_leaving() && !is_fit(worker, trainer_id)) ++roster.declined_count;
    if (worker.report.has_declined_last(trainer_id) && roster.declines.size() < wire::kRosterDeclineCountMax)
      roster.declines.push_back({.worker_id = worker_id, .reason = worker.report.decline_reason});
    if (worker.trainer_id != trainer_id) continue;
    roster.entries.push_back({.worker = {.worker_id = worker_id,
                                         .incarnation = worker.report.incarnation,
                                         .is_withdrawn = worker.is_withdrawn},
                              .endpoint = worker.report.endpoint,
                              .key = worker.holder.key});
  }
  if (roster.declined_count == roster.pool_count) add_mismatches(found->second.report, roster);
  return roster;
}

// In a pool with several kinds of workers this is expected, so it is reported only if there are no other workers.
void Roster::add_mismatches(const wire::TrainerReport& trainer, wire::TrainerRoster& roster) const {
  for (const auto& [worker_id, worker] : workers_) {
    const std::string reason = mismatch(worker.report, trainer);
    const bool is_told = reason.empty() || worker.is_leaving() || worker.report.has_declined(trainer.trainer_id);
    if (!is_told && roster.declines.size() < wire::kRosterDeclineCountMax)
      roster.declines.push_back({.worker_id = worker_id, .reason = reason});
  }
}

std::vector<Roster::WorkerStatus> Roster::workers(Instant now) const {
  std::vector<WorkerStatus> result;
  for (const auto& [worker_id, worker] : workers_)
    result.push_back({.report = worker.report,
                      .machine = worker.holder.machine,
                      .assigned_to = worker.trainer_id,
                      .is_withdrawn = worker.is_withdrawn,
                      .is_leaving = worker.is_leaving(),
                      .assigned_order = worker.assigned_order,
                      .since_report = now - worker.reported_at});
  return result;
}

std::vector<Roster::TrainerStatus> Roster::trainers(Instant now) const {
  std::vector<TrainerStatus> result;
  for (const auto& [trainer_id, trainer] : trainers_) {
    const bool is_idle = trainer.report.worker_count_max == 0;
    result.push_back({.report = trainer.report,
                      .user = trainer.user,
                      .worker_count = count_of_workers(trainer_id),
                      .since_report = now - trainer.reported_at,
                      .idle = is_idle ? now - trainer.wanted_at : Duration{},
                      .rates = trainer.rates,
                      .demand = trainer.scaler.measured() ? trainer.scaler.demand() : counted_demand(trainer),
                      .limit = trainer.scaler.limit(),
                      .measured = trainer.scaler.measured(),
                      .reason = trainer.scaler.reason(),
                      .change_count = trainer.scaler.change_count()});
  }
  return result;
}

uint32_t Roster::counted_demand(const Trainer& trainer) const {
  const auto trained_ns = [](const Trainer& one) { return one.report.queue.stepping_ns + one.report.queue.starved_ns; };
  uint32_t most = trainer.scaler.measured() ? std::numeric_limits<uint32_t>::max() : kFirstDemand;
  for (const auto& [other_id, other] : trainers_) {
    const bool is_of_its_program = other.user == trainer.user && other.report.about == trainer.report.about;
    if (!is_of_its_program || other.report.about.empty() || !other.scaler.measured()) continue;
    // Two loaders that are read in each step have the same time.
    const bool is_main = trained_ns(other) / 2 >= trained_ns(trainer) && trained_ns(other) > 0;
    if (is_main) most = std::min(most, std::max(1U, other.scaler.training_demand()));
  }
  return std::min(trainer.scaler.demand(), most);
}

uint32_t Roster::wanted_worker_count() const {
  uint64_t count = 0;
  for (const auto& [trainer_id, trainer] : trainers_) count += counted_demand(trainer);
  return static_cast<uint32_t>(std::min<uint64_t>(count, std::numeric_limits<uint32_t>::max()));
}

}  // namespace penstock::scheduling
