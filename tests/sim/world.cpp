// SPDX-License-Identifier: Apache-2.0
#include "world.h"

#include <algorithm>
#include <exception>

#include "processes.h"

namespace penstock::sim {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr uint64_t kEventsMax = 2'000'000;    // far beyond any run that ends
constexpr Duration kAfterwards = seconds(4);  // for messages on their way to come to rest
constexpr int kWastedMax = 4;                 // looks at a worker, one a second
constexpr int kHeldMax = 70;                  // looks at one that hangs, which is parted after kLeaveTime
constexpr Duration kNoticed = seconds(5);     // within which everybody knows, in a calm network
constexpr Duration kLastLate = seconds(8);    // the longest that faults reach beyond `calm_at`

// For the trace of one run.
std::string spoken(const Message& message) {
  if (const auto* m = std::get_if<WorkerMessage>(&message)) {
    constexpr const char* kNames[] = {"", "hello", "request", "cancel", "ack", "ping", "bye"};
    return std::string(kNames[static_cast<size_t>(m->head.kind)]) + " of trainer " +
           std::to_string(m->head.trainer_id) + ", link " + std::to_string(m->head.link) + ", stamp " +
           std::to_string(m->head.stamp) + ", " + to_text(m->head.key) + ", lane " + std::to_string(m->head.lane) +
           (m->head.is_lane_start ? " start" : "") + ", count " + std::to_string(m->head.count);
  }
  if (const auto* m = std::get_if<TrainerMessage>(&message)) {
    constexpr const char* kNames[] = {"",     "welcome", "refused",  "broken", "started", "answer", "handed back",
                                      "pong", "leaving", "declined", "died"};
    return std::string(kNames[static_cast<size_t>(m->head.kind)]) + " of worker " + std::to_string(m->worker_id) +
           ", link " + std::to_string(m->head.link) + ", stamp " + std::to_string(m->head.stamp) + ", " +
           to_text(m->head.key) + (m->head.is_fresh ? ", fresh" : "");
  }
  if (const auto* m = std::get_if<wire::TrainerRoster>(&message)) {
    std::string text = "roster " + std::to_string(m->view) + (m->is_settled ? ":" : " unsettled:");
    for (const auto& entry : m->entries)
      text += " " + std::to_string(entry.worker.worker_id) + "." + std::to_string(entry.worker.incarnation) +
              (entry.worker.is_withdrawn ? " withdrawn" : "");
    return text;
  }
  if (const auto* m = std::get_if<wire::WorkerReport>(&message))
    return "report of worker " + std::to_string(m->worker_id) + "." + std::to_string(m->incarnation) + " for trainer " +
           std::to_string(m->trainer_id) + (m->is_draining ? ", draining" : "") +
           (m->declined.empty() ? "" : ", which declined " + std::to_string(m->declined.size()));
  if (const auto* m = std::get_if<OrdersMessage>(&message))
    return "orders " + std::to_string(m->orders.view) + (m->orders.is_settled ? "" : " unsettled") + " for trainer " +
           std::to_string(m->orders.trainer_id) + (m->orders.is_to_part ? " alone" : "") +
           (m->orders.is_fenced ? ", fenced" : "") + (m->orders.is_to_drain ? ", drain" : "");
  return "report of a trainer";
}

}  // namespace

World::World(const Scenario& scenario, std::ostream* trace)
    : scenario_(scenario), trace_(trace), random_(scenario.seed ^ 0x9e3779b97f4a7c15u), hangs_left_(scenario.hangs) {}

World::~World() = default;

std::optional<std::string> World::run() {
  try {
    start();
    std::optional<Instant> done_at;
    while (!events_.empty()) {
      Event event = events_.top();
      events_.pop();
      if (event.at > Instant(scenario_.end_at)) break;
      if (++event_count_ > kEventsMax) return "it never comes to an end";
      now_ = std::max(now_, event.at);
      if (event.is_worlds) {
        event.action();
      } else {
        const auto process = processes_.find(event.process);
        if (process == processes_.end()) continue;
        if (process->second->stalled_until > now_) {
          event.at = process->second->stalled_until;
          events_.push(std::move(event));
          continue;
        }
        event.action();
      }
      // The event may have ended the process.
      for (auto& [id, process] : processes_) wake(*process);
      check_credit();
      check_hangs();
      if (!is_settled()) {
        done_at.reset();
      } else if (!done_at) {
        done_at = now_;
      } else if (now_ > *done_at + kAfterwards) {
        if (now_ > Instant(scenario_.calm_at) + kAfterwards) check_memory();
        return std::nullopt;
      }
    }
    check_progress();
    return std::nullopt;
  } catch (const Violation& violation) {
    return violation.text;
  } catch (const std::exception& error) {
    return error.what();
  }
}

void World::start() {
  processes_.emplace(kController, std::make_unique<SimController>(*this, kController));
  for (uint32_t i = 0; i < scenario_.worker_count; ++i) add_worker(i == 0 ? 0 : draw_declined_jobs());
  for (uint32_t job = 0; job < scenario_.trainer_count; ++job) add_trainer(job, nullptr);
  plan_faults();
  fault_at(Instant(scenario_.calm_at) + kAfterwards, [this] { check_sharing(); });
}

// Jobs by their bits. One worker, and whatever takes its place, can run them all.
uint32_t World::draw_declined_jobs() {
  uint32_t jobs = 0;
  for (uint32_t job = 0; scenario_.has_declining && job < scenario_.trainer_count; ++job)
    if (chance() < 0.4) jobs |= 1u << job;
  return jobs;
}

void World::add_worker(uint32_t declined_jobs) {
  const ProcessId id = next_process_++;
  const uint64_t worker_id = new_identity();
  workers_.emplace(worker_id, id);
  auto worker = std::make_unique<SimWorker>(*this, id, worker_id, declined_jobs);
  say(worker->name(), " starts");
  wake(*worker);
  processes_.emplace(id, std::move(worker));
}

void World::add_trainer(uint32_t job, std::unique_ptr<SimTrainer> resumed_from) {
  const ProcessId id = next_process_++;
  const uint64_t trainer_id = new_identity();
  trainers_.emplace(trainer_id, id);
  auto trainer = std::make_unique<SimTrainer>(*this, id, trainer_id, job, resumed_from.get());
  say(trainer->name(), " starts");
  SimTrainer& started = *trainer;
  processes_.emplace(id, std::move(trainer));
  started.begin();
  wake(started);
}

void World::add_intruder() {
  const ProcessId id = next_process_++;
  const uint64_t trainer_id = new_identity();
  trainers_.emplace(trainer_id, id);
  intruders_.insert(trainer_id);
  auto intruder = std::make_unique<SimIntruder>(*this, id, trainer_id);
  say(intruder->name(), " comes");
  wake(*intruder);
  processes_.emplace(id, std::move(intruder));
}

// ---- Faults

ProcessId World::pick_process(bool (*wanted)(const Process&)) {
  std::vector<ProcessId> found;
  for (const auto& [id, process] : processes_)
    if (wanted(*process)) found.push_back(id);
  if (found.empty()) return next_process_;  // nobody
  return found[std::uniform_int_distribution<size_t>(0, found.size() - 1)(random_)];
}

void World::fault_at(Instant when, std::function<void()> action) {
  events_.push({.at = when, .order = ++event_count_, .process = 0, .is_worlds = true, .action = std::move(action)});
}

void World::plan_faults() {
  const auto is_worker = [](const Process& process) { return dynamic_cast<const SimWorker*>(&process) != nullptr; };
  const auto is_trainer = [](const Process& process) { return dynamic_cast<const SimTrainer*>(&process) != nullptr; };
  const auto is_any = [](const Process&) { return true; };
  const auto plan = [&](uint32_t count, const std::function<void()>& action) {
    for (uint32_t i = 0; i < count; ++i) fault_at(Instant(between(Duration(0), scenario_.calm_at)), action);
  };
  const auto crash = [this, is_worker](bool is_seen) {
    const ProcessId victim = pick_process(is_worker);
    if (!processes_.contains(victim)) return;
    const uint32_t declined_jobs = static_cast<const SimWorker&>(*processes_.at(victim)).declined_jobs();
    kill(victim, is_seen);
    fault_at(now_ + between(milliseconds(10), seconds(3)), [this, declined_jobs] { add_worker(declined_jobs); });
  };
  plan(scenario_.worker_crashes, [crash] { crash(true); });
  plan(scenario_.machine_crashes, [crash] { crash(false); });
  plan(scenario_.intruders, [this] { add_intruder(); });
  plan(scenario_.worker_joins, [this] { add_worker(draw_declined_jobs()); });
  plan(scenario_.worker_drains, [this, is_worker] {
    const auto victim = processes_.find(pick_process(is_worker));
    if (victim == processes_.end()) return;
    auto& worker = static_cast<SimWorker&>(*victim->second);
    say(worker.name(), " is drained");
    const auto controller = processes_.find(kController);
    if (chance() < 0.5 && controller != processes_.end()) {
      static_cast<SimController&>(*controller->second).drain(worker.worker_id());
    } else {
      worker.drain();
    }
    fault_at(now_ + between(milliseconds(10), seconds(3)),
             [this, declined_jobs = worker.declined_jobs()] { add_worker(declined_jobs); });
  });
  plan(scenario_.stalls, [this, is_any] {
    const auto victim = processes_.find(pick_process(is_any));
    if (victim == processes_.end()) return;
    victim->second->stalled_until = now_ + between(milliseconds(100), 3 * session::kLease);
    say(victim->second->name(), " stalls");
  });
  plan(scenario_.partitions, [this, is_any] {
    const ProcessId a = pick_process(is_any);
    const ProcessId b = pick_process(is_any);
    const Instant until = now_ + between(milliseconds(100), 3 * session::kLease);
    const double way = chance();
    if (way < 0.7) cuts_[{a, b}] = until;
    if (way > 0.3) cuts_[{b, a}] = until;
    say("processes ", a, " and ", b, " are cut apart");
  });
  plan(scenario_.controller_crashes, [this] {
    if (!processes_.contains(kController)) return;
    kill(kController, true);
    fault_at(now_ + between(milliseconds(10), seconds(4)), [this] {
      processes_.emplace(kController, std::make_unique<SimController>(*this, kController));
      say("controller starts again");
    });
  });
  plan(scenario_.trainer_crashes, [this, is_trainer] {
    const auto victim = processes_.find(pick_process(is_trainer));
    if (victim == processes_.end()) return;
    auto* trainer = static_cast<SimTrainer*>(victim->second.release());
    processes_.erase(victim);
    if (trainer->is_done()) {  // its program had ended
      processes_.emplace(trainer->id(), trainer);
      return;
    }
    say(trainer->name(), " crashes");
    resting_.emplace_back(trainer);
    fault_at(now_ + between(milliseconds(10), seconds(3)), [this, trainer] {
      const auto rests = std::find_if(resting_.begin(), resting_.end(), [&](auto& r) { return r.get() == trainer; });
      auto resumed = std::move(*rests);
      resting_.erase(rests);
      const uint32_t job = resumed->job();
      add_trainer(job, std::move(resumed));
    });
  });
  plan(scenario_.process_ends, [this, is_worker] {
    const ProcessId id = pick_process(is_worker);
    at(now_, id, [this, id] { end_process_of(static_cast<SimWorker&>(*processes_.at(id))); });
  });
}

void World::kill(ProcessId victim, bool is_seen) {
  const auto found = processes_.find(victim);
  say(found->second->name(), is_seen ? " crashes" : " is gone with its machine");
  const std::unique_ptr<Process> dead = std::move(found->second);
  processes_.erase(found);
  const auto* worker = dynamic_cast<const SimWorker*>(dead.get());
  if (worker == nullptr) return;
  if (worker->working_on()) ++deaths_[*worker->working_on()];
  // To a trainer that lost the answer, this is a batch that was begun.
  for (const BatchKey key : worker->kept()) ++deaths_[{worker->job(), key}];
  if (!is_seen) return;
  for (const auto& [id, process] : processes_) {
    if (dynamic_cast<const SimTrainer*>(process.get()) == nullptr || is_cut(victim, id)) continue;
    // The connection ends after the messages that were sent on it.
    const Instant seen_at = std::max(arrivals_[{victim, id}], now_) + between(microseconds(100), milliseconds(5));
    const ProcessId trainer_process = id;
    at(seen_at, id, [this, trainer_process, worker_id = worker->worker_id()] {
      static_cast<SimTrainer&>(*processes_.at(trainer_process)).worker_died(worker_id);
    });
  }
}

void World::end_process_of(SimWorker& worker) {
  say("the process ends in which ", worker.name(), " makes its batches");
  if (worker.working_on()) ++deaths_[*worker.working_on()];
  worker.lose_process();
}

void World::die_of(SimWorker& worker, uint32_t job, BatchKey key) {
  if (worker.working_on() != std::pair(job, key)) return;
  if (scenario_.poison_spares_workers) return end_process_of(worker);
  const uint32_t declined_jobs = worker.declined_jobs();
  kill(worker.id(), true);
  fault_at(now_ + between(milliseconds(10), seconds(1)), [this, declined_jobs] { add_worker(declined_jobs); });
}

void World::leave(SimWorker& worker) {
  say(worker.name(), " leaves");
  if (const auto controller = processes_.find(kController); controller != processes_.end())
    static_cast<SimController&>(*controller->second).left(worker.worker_id());
  const ProcessId id = worker.id();
  fault_at(now_, [this, id] { processes_.erase(id); });
}

void World::close(SimWorker& worker) {
  fault_at(now_, [this, id = worker.id()] {
    const auto found = processes_.find(id);
    if (found == processes_.end()) return;
    const uint64_t worker_id = static_cast<SimWorker&>(*found->second).worker_id();
    say(found->second->name(), " leaves without having ended what it had begun");
    kill(id, true);
    if (const auto controller = processes_.find(kController); controller != processes_.end())
      static_cast<SimController&>(*controller->second).left(worker_id);
  });
}

std::optional<Duration> World::hang_of(SimWorker& worker, uint32_t job, BatchKey key) {
  if (scenario_.has_hang_poison && job == 0 && key == poison_key()) {
    say(worker.name(), " hangs in ", to_text(key), ", as every one does");
    return Duration::max();
  }
  if (hangs_left_ == 0 || now_ >= Instant(scenario_.calm_at) || chance() >= scenario_.hang) return std::nullopt;
  --hangs_left_;
  const bool is_endless = chance() < 0.7;
  say(worker.name(), " hangs in ", to_text(key), is_endless ? " for ever" : " for a while");
  return is_endless ? Duration::max() : between(milliseconds(500), seconds(8));
}

bool World::has_blame(uint32_t job, BatchKey key, uint32_t death_count) const {
  const auto found = deaths_.find({job, key});
  return found != deaths_.end() && found->second >= death_count;
}

std::optional<BatchKey> World::poison() const {
  if (!scenario_.has_poison) return std::nullopt;
  return poison_key();
}

BatchKey World::poison_key() const { return {.epoch = 0, .sequence = scenario_.batch_count / 2}; }

// ---- Network and clock

bool World::is_cut(ProcessId from, ProcessId to) const {
  const auto cut = cuts_.find({from, to});
  return cut != cuts_.end() && now_ < cut->second;
}

void World::send(ProcessId from, ProcessId to, Message message) {
  if (trace_ != nullptr) say(from, " -> ", to, ": ", spoken(message), is_cut(from, to) ? " (cut off)" : "");
  if (is_cut(from, to)) return;
  const bool is_calm = now_ >= Instant(scenario_.calm_at);
  if (!is_calm && chance() < scenario_.loss) return say("  which is lost");
  const int copies = !is_calm && chance() < scenario_.duplication ? 2 : 1;
  for (int copy = 0; copy < copies; ++copy) {
    Instant arrives_at = now_ + between(microseconds(100), milliseconds(4));
    const bool is_late = !is_calm && chance() < scenario_.lateness;
    if (is_late) {
      arrives_at += between(milliseconds(100), seconds(6));
    } else if (is_calm || chance() >= scenario_.reordering) {
      Instant& last = arrivals_[{from, to}];
      arrives_at = last = std::max(arrives_at, last);
    }
    at(arrives_at, to, [this, from, to, message, renewal = renewals_[{from, to}]] {
      if (renewal == renewals_[{from, to}]) processes_.at(to)->receive(from, message);
    });
  }
}

void World::renew(ProcessId from, ProcessId to) {
  say(from, " connects to ", to, " anew");
  ++renewals_[{to, from}];
}

void World::at(Instant when, ProcessId process, std::function<void()> action) {
  events_.push(
      {.at = when, .order = ++event_count_, .process = process, .is_worlds = false, .action = std::move(action)});
}

void World::wake(Process& process) {
  const auto next = process.next_tick();
  if (!next) return;
  const Instant due = std::max(*next, now_);
  if (process.wake_at && *process.wake_at <= due) return;
  process.wake_at = due;
  const ProcessId id = process.id();
  at(due, id, [this, id] {
    Process& woken = *processes_.at(id);
    if (!woken.wake_at || *woken.wake_at > now_) return;
    woken.wake_at.reset();
    woken.tick();
  });
}

ProcessId World::process_of_worker(uint64_t worker_id) const { return workers_.at(worker_id); }
std::vector<uint64_t> World::worker_ids() const {
  std::vector<uint64_t> ids;
  for (const auto& [worker_id, process] : workers_) ids.push_back(worker_id);
  return ids;
}
ProcessId World::process_of_trainer(uint64_t trainer_id) const { return trainers_.at(trainer_id); }

// ---- Invariants

bool World::is_done() const {
  if (!resting_.empty()) return false;
  return std::all_of(processes_.begin(), processes_.end(), [](const auto& item) {
    const auto* trainer = dynamic_cast<const SimTrainer*>(item.second.get());
    return trainer == nullptr || trainer->is_done();
  });
}

// Nothing is left that is still to end.
bool World::is_settled() const { return is_done() && abandoned_.empty() && draining_.empty(); }

bool World::is_wanted(uint64_t trainer_id, BatchKey key) const {
  const auto found = trainers_.find(trainer_id);
  const auto process = found == trainers_.end() ? processes_.end() : processes_.find(found->second);
  if (process == processes_.end()) return false;
  const auto* trainer = dynamic_cast<const SimTrainer*>(process->second.get());
  return trainer != nullptr && trainer->session().dispatch().is_unanswered(key);
}

bool World::is_held_up(const SimTrainer& trainer) const {
  std::map<BatchKey, int> hung;  // batches of this trainer, and at how many workers
  bool has_healthy = false;
  for (const auto& [id, process] : processes_) {
    const auto* worker = dynamic_cast<const SimWorker*>(process.get());
    if (worker == nullptr) continue;
    const auto work = worker->work();
    const bool is_its = work && work->first == trainer.trainer_id() && worker->session().is_wanted();
    if (is_its && worker->is_hung()) ++hung[work->second];
    has_healthy = has_healthy || worker->can_make(trainer.job());
  }
  if (!has_healthy) return true;
  const int copies_max = scenario_.shard_count != 0 ? 1 : 2;
  return std::ranges::any_of(hung, [&](const auto& item) { return item.second >= copies_max; });
}

void World::check_progress() const {
  for (const auto& [id, process] : processes_) {
    const auto* trainer = dynamic_cast<const SimTrainer*>(process.get());
    if (trainer == nullptr || trainer->is_done()) continue;
    if (!scenario_.has_hangs()) throw Violation{"a trainer was not given all of its batches"};
    if (scenario_.timeout > Duration(0) && !trainer->is_recalling())
      throw Violation{trainer->name() + " waits for longer than its timeout"};
    if (!is_held_up(*trainer)) throw Violation{trainer->name() + " waits while a worker could make its batches"};
  }
}

// A batch is wanted while its trainer waits for it, whatever the worker has heard.
void World::check_hangs() {
  const Instant calm_at = Instant(scenario_.calm_at) + kLastLate;
  for (const auto& [id, process] : processes_) {
    const auto* worker = dynamic_cast<const SimWorker*>(process.get());
    if (worker == nullptr) continue;
    const Instant awake_since = std::min(now_, process->stalled_until);
    const auto work = worker->work();
    if (!work || is_wanted(work->first, work->second)) {
      abandoned_.erase(id);
    } else {
      Abandoned& abandoned = abandoned_.try_emplace(id, Abandoned{*work, now_}).first->second;
      if (abandoned.work != *work) abandoned = {*work, now_};
      const Instant since = std::max({abandoned.since, awake_since, calm_at});
      if (now_ > since + worker->grace_for_abandoned() + kNoticed)
        throw Violation{worker->name() + " is at " + to_text(work->second) +
                        " for longer than its grace, and no trainer wants it"};
    }
    if (!worker->session().is_draining()) continue;
    const Instant since = std::max(draining_.try_emplace(id, now_).first->second, awake_since);
    if (now_ > since + scenario_.drain_grace + seconds(1))
      throw Violation{worker->name() + " was to leave, and has not ended within its grace"};
  }
  const auto is_gone = [this](const auto& item) { return !processes_.contains(item.first); };
  std::erase_if(abandoned_, is_gone);
  std::erase_if(draining_, is_gone);
}

void World::check_credit() const {
  for (const auto& [id, process] : processes_) {
    const auto* worker = dynamic_cast<const SimWorker*>(process.get());
    if (worker == nullptr) continue;
    const auto& session = worker->session();
    const size_t running = session.is_wanted() ? 1 : 0;
    const size_t count = std::max(session.queued_count() + session.claimed_count(), session.held_count()) + running;
    const size_t most = scenario_.credit_bytes / kBatchBytes + (scenario_.recall > 0 ? 1 : 0);  // one recall beyond it
    if (count > 1 && count > most)
      throw Violation{worker->name() + " has " + std::to_string(count) +
                      " batches asked of it or held, and credit for " +
                      std::to_string(scenario_.credit_bytes / kBatchBytes)};
  }
}

bool World::is_hung_or_gone(uint64_t worker_id) const {
  const auto found = processes_.find(workers_.at(worker_id));
  return found == processes_.end() || static_cast<const SimWorker&>(*found->second).is_hung();
}

// At a batch that nobody wants, for long, without having told it.
bool World::is_stuck_unseen(const wire::WorkerReport& report) const {
  const ProcessId id = workers_.at(report.worker_id);
  const auto abandoned = abandoned_.find(id);
  if (abandoned == abandoned_.end() || report.is_stuck()) return false;
  const auto& worker = static_cast<const SimWorker&>(*processes_.at(id));
  return now_ > abandoned->second.since + worker.stuck_after() + kNoticed;
}

// Once a second. A worker that moves, or whose trainer has just ended, is on its way.
void World::check_sharing() {
  std::map<uint64_t, int> wasted;
  const auto controller = processes_.find(kController);
  if (controller != processes_.end()) {
    const auto& roster = static_cast<const SimController&>(*controller->second).roster();
    const auto trainers = roster.trainers(now_);
    const auto workers = roster.workers(now_);
    // One that hangs at a batch that its trainer waits for leaves that trainer after kLeaveTime. Nobody else is moved
    // in its place until then.
    const auto is_held = [&](const auto& worker) {
      return worker.is_withdrawn && is_hung_or_gone(worker.report.worker_id);
    };
    const bool is_any_held = std::ranges::any_of(workers, is_held);
    for (const auto& worker : workers) {
      if (is_intruder(worker.report.trainer_id)) continue;  // until kLeaveTime is over
      const auto owner = std::ranges::find(trainers, worker.assigned_to,
                                           [](const auto& trainer) { return trainer.report.trainer_id; });
      const auto should_have = [&](const scheduling::Roster::TrainerStatus& trainer) {
        return trainer.worker_count < trainer.report.worker_count_max &&
               !worker.report.has_declined(trainer.report.trainer_id) &&
               (owner == trainers.end() || trainer.worker_count + 1 < owner->worker_count);
      };
      const bool is_missing = !is_any_held && !worker.report.is_draining && !worker.report.is_stuck() &&
                              std::ranges::any_of(trainers, should_have);
      const bool is_useless =
          worker.report.has_declined(worker.assigned_to) || (worker.report.is_stuck() && worker.assigned_to != 0);
      // One that is withdrawn is left within a batch, long before kLeaveTime.
      if (!is_missing && !is_useless && !worker.is_withdrawn && !is_stuck_unseen(worker.report)) continue;
      const int times = wasted_[worker.report.worker_id] + 1;
      wasted[worker.report.worker_id] = times;
      if (times > (is_held(worker) ? kHeldMax : kWastedMax))
        throw Violation{"worker " + std::to_string(worker.report.worker_id) +
                        " is for long where it is of no use, or of less than elsewhere"};
    }
  }
  wasted_ = std::move(wasted);
  fault_at(now_ + seconds(1), [this] { check_sharing(); });
}

void World::check_memory() const {
  for (const auto& [id, process] : processes_) {
    if (process->stalled_until + kAfterwards > now_ && process->stalled_until > Instant{}) continue;  // it is behind
    if (const auto* worker = dynamic_cast<const SimWorker*>(process.get())) {
      if (worker->session().queued_count() + worker->session().held_count() + worker->kept().size() > 0)
        throw Violation{worker->name() + " still has batches when all trainers are done"};
    } else if (const auto* trainer = dynamic_cast<const SimTrainer*>(process.get())) {
      if (trainer->session().dispatch().unanswered_count() > 0)
        throw Violation{trainer->name() + " still waits for batches when it is done"};
    }
  }
}

}  // namespace penstock::sim
