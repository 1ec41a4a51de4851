// SPDX-License-Identifier: Apache-2.0
#include "processes.h"

#include <algorithm>
#include <utility>

namespace penstock::sim {

using wire::ToTrainer;
using wire::ToWorker;

namespace {

// Of the live worker: pool_server_io's kLookInterval and job_host's kJobEndGrace.
constexpr Duration kLookInterval = std::chrono::milliseconds(200);
constexpr Duration kJobEndGrace = std::chrono::seconds(2);

}  // namespace

// ---- Controller

SimController::SimController(World& world, ProcessId id)
    : Process(world, id), roster_(world.new_identity(), world.now()) {}

void SimController::receive(ProcessId from, const Message& message) {
  if (const auto* report = std::get_if<wire::WorkerReport>(&message)) {
    world_.send(id(), from, OrdersMessage{roster_.worker_reported(*report, world_.now())});
  } else if (const auto* trainer = std::get_if<wire::TrainerReport>(&message)) {
    const auto roster = roster_.trainer_reported(*trainer, world_.now());
    push_orders();
    world_.send(id(), from, roster);
  }
  push();
}

void SimController::tick() {
  roster_.tick(world_.now());
  push();
}

bool SimController::drain(uint64_t worker_id) {
  const bool is_known = roster_.drain(worker_id, world_.now());
  push();
  return is_known;
}

void SimController::left(uint64_t worker_id) {
  roster_.worker_left(worker_id, world_.now());
  push();
}

void SimController::push_orders() {
  for (const auto& [worker_id, orders] : roster_.take_orders())
    world_.send(id(), world_.process_of_worker(worker_id), OrdersMessage{orders});
}

void SimController::push() {
  push_orders();
  for (const uint64_t trainer_id : roster_.changed_trainers()) {
    const auto roster = roster_.roster_of(trainer_id);
    world_.send(id(), world_.process_of_trainer(trainer_id), roster);
  }
}

// ---- Intruder

void SimIntruder::receive(ProcessId, const Message& message) {
  const auto* answer = std::get_if<TrainerMessage>(&message);
  if (answer == nullptr) return;
  Link& link = links_[answer->worker_id];
  if (answer->head.link != link.number) return;
  if (answer->head.kind == ToTrainer::Kind::kWelcome) link.is_open = true;
  if (answer->head.kind == ToTrainer::Kind::kRefused || answer->head.kind == ToTrainer::Kind::kBroken)
    link.is_open = false;
}

void SimIntruder::tick() {
  due_at_ = world_.now() + std::chrono::milliseconds(400);
  for (const uint64_t worker_id : world_.worker_ids()) {
    Link& link = links_[worker_id];
    if (!link.is_open) link = {.number = ++link_count_};
    WorkerMessage message{.head = {.kind = link.is_open ? ToWorker::Kind::kPing : ToWorker::Kind::kHello,
                                   .trainer_id = trainer_id_,
                                   .link = link.number,
                                   .stamp = ++link.stamp}};
    world_.send(id(), world_.process_of_worker(worker_id), message);
  }
}

// ---- Worker

SimWorker::SimWorker(World& world, ProcessId id, uint64_t worker_id, uint32_t declined_jobs)
    : Process(world, id), declined_jobs_(declined_jobs), enrolment_(worker_id, world.now()) {
  session_.assign(0, /*is_to_part=*/false);
}

void SimWorker::receive(ProcessId, const Message& message) {
  if (const auto* orders = std::get_if<OrdersMessage>(&message)) {
    enrolment_.receive(orders->orders, session_, world_.now());
  } else if (const auto* request = std::get_if<WorkerMessage>(&message)) {
    session_.receive(request->head, world_.now());
    carry_out();  // what was dropped by it goes before its bytes are kept
    const bool is_last = request->head.kind == ToWorker::Kind::kBye && !request->head.is_continued;
    if (is_last && work_ && work_->trainer_id == request->head.trainer_id &&
        session_.trainer_id() != request->head.trainer_id)
      give_up_work();
    if (session_.trainer_id() == request->head.trainer_id) {
      job_ = request->job;
      if (request->head.is_lane_start) lane_starts_[request->head.key] = request->lane_position;
    }
  }
  carry_out();
  begin();
  look();
}

void SimWorker::tick() {
  session_.tick(world_.now());
  enrolment_.tick(session_, world_.now());
  was_open_ = was_open_ || enrolment_.clock.time_since_answer(world_.now()) >= session::kOrdersValidity;
  if (enrolment_.take(session_, world_.now())) {
    auto report = enrolment_.report(session_);
    const auto stuck = watch_.is_stuck() ? watch_.abandoned() : Duration(0);
    report.stuck_ms = static_cast<uint32_t>(std::chrono::duration_cast<std::chrono::milliseconds>(stuck).count());
    world_.send(id(), kController, report);
  }
  carry_out();
  begin();
  look();
  if (session_.is_draining() && session_.is_empty() && session_.trainer_id() == 0) world_.leave(*this);
}

std::optional<Instant> SimWorker::next_tick() const {
  std::optional<Instant> due = earlier(enrolment_.due_at(session_), session_.next_tick());
  if (work_ || session_.is_draining()) due = earlier(due, checked_at_ + kLookInterval);
  return due;
}

void SimWorker::drain() {
  session_.drain();
  enrolment_.clock.hurry(world_.now());
  carry_out();
}

void SimWorker::lose_process() {
  session_.lose_process(work_ ? work_->trainer_id : session_.trainer_id());
  work_.reset();
  lanes_.clear();
  carry_out();
}

std::optional<std::pair<uint32_t, BatchKey>> SimWorker::working_on() const {
  if (!work_) return std::nullopt;
  return std::pair(work_->content.job, work_->request.key);
}

std::optional<std::pair<uint64_t, BatchKey>> SimWorker::work() const {
  if (!work_) return std::nullopt;
  return std::pair(work_->trainer_id, work_->request.key);
}

// As serve_maker() and end_lost_process() of the live worker.
void SimWorker::look() {
  using State = server::MakerWatch::State;
  checked_at_ = world_.now();
  watch_.note(!work_ ? State::kWaiting : session_.may_be_wanted() ? State::kMaking : State::kAbandoned, checked_at_);
  if (session_.is_draining() && !drained_at_) drained_at_ = checked_at_;
  const bool is_late = server::is_drain_over(drained_at_, world_.scenario().drain_grace, checked_at_);
  if (watch_.is_lost(world_.scenario().abandoned_grace)) {
    end_work();
    if (!is_late) return;
  } else if (!is_late) {
    return;
  }
  if (!std::exchange(is_closing_, true)) world_.close(*this);
}

// The warm process is told to kill that of the job, and tells when it has ended. One that waits in the kernel does not
// end, and is given up.
void SimWorker::end_work() {
  if (!work_ || std::exchange(work_->is_ending, true)) return;
  const bool ends = std::bernoulli_distribution(0.8)(world_.random());
  const Duration time = ends ? std::chrono::milliseconds(5) : kJobEndGrace;
  world_.at(world_.now() + time, id(), [this, number = work_number_] {
    if (number == work_number_ && work_) world_.end_process_of(*this);
  });
}

void SimWorker::give_up_work() {
  work_.reset();
  session_.finished();
  carry_out();
}

Duration SimWorker::grace_for_abandoned() const {
  const auto& grace = world_.scenario().abandoned_grace;
  return kJobEndGrace + (longest_ ? std::max(grace.later, 2 * *longest_) : grace.first_batch);
}

Duration SimWorker::stuck_after() const {
  return std::max<Duration>(std::chrono::seconds(2), longest_.value_or(Duration(0)));
}

std::vector<BatchKey> SimWorker::kept() const {
  std::vector<BatchKey> keys;
  for (const auto& [key, content] : made_) keys.push_back(key);
  return keys;
}

void SimWorker::carry_out() {
  if (session_.trainer_id() != trainer_id_) {
    trainer_id_ = session_.trainer_id();
    lanes_.clear();
    lane_starts_.clear();
  }
  for (const auto& command : session_.take_commands()) {
    if (command.kind == session::WorkerSession::Command::Kind::kDrop) {
      made_.erase(command.key);
      continue;
    }
    if (command.message.kind == ToTrainer::Kind::kWelcome && world_.is_intruder(command.trainer_id) && !was_open_)
      throw Violation{name() + " serves a trainer that the controller has not given it to"};
    if (command.message.kind == ToTrainer::Kind::kWelcome && command.message.is_fresh) {
      ++tenancy_;
      lanes_.clear();
      lane_starts_.clear();
    }
    TrainerMessage message{.worker_id = worker_id(), .head = command.message, .content = {}};
    if (command.message.kind == ToTrainer::Kind::kAnswer) {
      const auto made = made_.find(command.message.key);
      if (made == made_.end()) throw Violation{name() + " has no bytes of " + to_text(command.message.key)};
      message.content = made->second;
    }
    world_.send(id(), world_.process_of_trainer(command.trainer_id), message);
  }
}

void SimWorker::begin() {
  const auto request = session_.begin();
  if (!request) return;
  if ((declined_jobs_ >> job_ & 1) != 0) {
    session_.decline();
    session_.finished();
    return carry_out();
  }
  carry_out();
  if (work_tenancy_ != tenancy_) {
    watch_.begin_tenancy();
    longest_.reset();
  }
  work_tenancy_ = tenancy_;
  work_ = Work{
      .request = *request, .content = make(*request), .trainer_id = session_.trainer_id(), .begun_at = world_.now()};
  const uint64_t number = ++work_number_;
  const auto mean = world_.scenario().work_time.count();
  Duration time(std::uniform_int_distribution<int64_t>(mean / 2, mean * 2)(world_.random()));
  if (const auto hang = world_.hang_of(*this, job_, request->key)) {
    work_->is_endless = *hang == Duration::max();
    if (work_->is_endless) return;
    time += *hang;
  }
  if (job_ == 0 && world_.poison() == request->key) {
    world_.at(world_.now() + time, id(), [this, key = request->key] { world_.die_of(*this, 0, key); });
    return;
  }
  world_.at(world_.now() + time, id(), [this, number] { finish(number); });
}

Content SimWorker::make(const session::WorkerSession::Request& request) {
  Content content{.job = job_, .epoch = request.key.epoch};
  if (request.lane == wire::kNoLane) {
    content.position = wire::number_of(request.key);
    return content;
  }
  content.shard = request.lane - 1;
  const std::pair lane{request.key.epoch, request.lane};
  if (request.is_lane_start) lanes_[lane] = lane_starts_.at(request.key);
  const auto position = lanes_.find(lane);
  if (position == lanes_.end()) {
    // The lane began here with a request that was taken back. So is this one, though that has not arrived yet.
    content.position = kNowhere;
    return content;
  }
  content.position = position->second;
  content.is_end = position->second == world_.scenario().batch_count;
  if (!content.is_end) ++position->second;
  return content;
}

void SimWorker::finish(uint64_t number) {
  if (number != work_number_ || !work_ || work_->is_ending) return;
  const Duration time = world_.now() - work_->begun_at;
  watch_.note_made(time);
  longest_ = std::max(longest_.value_or(Duration(0)), time);
  made_[work_->request.key] = work_->content;
  work_.reset();
  session_.finished();
  carry_out();
  begin();
}

// ---- Trainer

SimTrainer::SimTrainer(World& world, ProcessId id, uint64_t trainer_id, uint32_t job, const SimTrainer* resumed_from)
    : Process(world, id),
      trainer_id_(trainer_id),
      job_(job),
      session_({.trainer_id = trainer_id,
                .credit_bytes = world.scenario().credit_bytes,
                .dispatch = {.depth_max = world.scenario().depth_max}}),
      enrolment_(world.now()) {
  progress_.shard_positions.assign(world.scenario().shard_count, 0);
  if (resumed_from != nullptr) progress_ = resumed_from->progress_;
}

void SimTrainer::begin() { begin_epoch(); }

void SimTrainer::begin_epoch() {
  const Scenario& scenario = world_.scenario();
  if (progress_.epoch == scenario.epoch_count) return end_program();
  const bool is_iterable = scenario.shard_count != 0;
  order_.emplace(session::RequestOrderOptions{.shard_count = std::max(1u, scenario.shard_count),
                                              .outstanding_count_max = scenario.depth_max * scenario.worker_count,
                                              .first_sequence = progress_.delivered_count,
                                              .first_shard_id = is_iterable ? progress_.next_shard : 0});
  requested_count_ = progress_.delivered_count;
  lane_positions_ = progress_.shard_positions;
  ready_.clear();
  fill();
  carry_out();
  consume();
}

void SimTrainer::end_program() {
  is_done_ = true;
  waits_since_.reset();
  if (!world_.scenario().sends_goodbye) return;
  has_left_ = true;
  session_.leave(world_.now());
  carry_out();
}

// The program sees the error and ends.
void SimTrainer::fail() {
  const auto end = order_->send_count();
  for (uint64_t sequence = 0; sequence < end; ++sequence) session_.forget({progress_.epoch, sequence}, world_.now());
  if (recalled_) session_.forget(*recalled_, world_.now());
  end_program();
}

void SimTrainer::fill() {
  const Scenario& scenario = world_.scenario();
  while (!is_done_ && order_->outstanding_count() < order_->outstanding_count_max() &&
         order_->undelivered_count() < order_->outstanding_count_max()) {
    if (scenario.shard_count == 0 && requested_count_ == scenario.batch_count) return;
    const auto assignment = order_->assign();
    if (!assignment) return;
    ++requested_count_;
    const wire::Lane lane = scenario.shard_count == 0 ? wire::kNoLane : assignment->shard_id + 1;
    session_.ask({progress_.epoch, assignment->sequence}, lane, world_.now());
  }
}

void SimTrainer::receive(ProcessId, const Message& message) {
  if (has_left_) return;
  if (const auto* roster = std::get_if<wire::TrainerRoster>(&message)) {
    if (enrolment_.receive(*roster, world_.now())) {
      std::vector<wire::RosterEntry> entries;
      for (const auto& entry : roster->entries) entries.push_back(entry.worker);
      session_.set_roster(entries, world_.now());
    }
  } else if (const auto* answer = std::get_if<TrainerMessage>(&message)) {
    const uint64_t bytes = answer->content ? kBatchBytes : 0;
    if (session_.receive(answer->worker_id, answer->head, bytes, world_.now())) {
      answerer_id_ = answer->worker_id;
      take(answer->head, *answer->content);
    }
  }
  carry_out();
  consume();
}

// The rest of a batch: of the one that was delivered last, or of any before it, whose epoch may be over. The worker
// that is thought to have it is the one that answered last, which may be gone.
void SimTrainer::maybe_recall(BatchKey delivered) {
  std::uniform_real_distribution<double> chance(0, 1);
  if (chance(world_.random()) >= world_.scenario().recall) return;
  const auto draw = [&](uint64_t most) { return std::uniform_int_distribution<uint64_t>(0, most)(world_.random()); };
  BatchKey key = delivered;
  if (chance(world_.random()) < 0.2) {
    key.epoch = static_cast<uint32_t>(draw(delivered.epoch));
    key.sequence = draw(key.epoch == delivered.epoch ? delivered.sequence : world_.scenario().batch_count - 1);
  }
  recalled_ = wire::recall_of(key);
  session_.ask(*recalled_, wire::kNoLane, world_.now(), nullptr, answerer_id_);
  if (chance(world_.random()) >= 0.1) return;
  // The program gives it up after a while.
  const uint64_t number = ++recall_number_;
  world_.at(world_.now() + Duration(draw(2 * world_.scenario().work_time.count())), id(), [this, number] {
    if (number != recall_number_ || !recalled_) return;
    session_.forget(*recalled_, world_.now());
    recalled_.reset();
    carry_out();
    consume();
  });
}

void SimTrainer::take_recalled(const ToTrainer& head, const Content& content) {
  if (head.key != recalled_)
    throw Violation{name() + " was given " + to_text(head.key) + ", which it had not recalled"};
  const Content due{.job = job_, .epoch = head.key.epoch, .position = wire::number_of(head.key)};
  if (content != due) throw Violation{name() + " recalled a batch and was given another one"};
  recalled_.reset();
  ++recall_number_;
}

void SimTrainer::take(const ToTrainer& head, const Content& content) {
  if (wire::is_recall(head.key)) return take_recalled(head, content);
  if (head.key.epoch != progress_.epoch) throw Violation{name() + " was given a batch of another epoch"};
  if (content.is_end) {
    order_->shard_ended(head.key.sequence);
    session_.end_lane(head.key.epoch, content.shard + 1, world_.now());
    return fill();
  }
  if (world_.scenario().shard_count != 0 && content.position != lane_positions_.at(content.shard)++)
    throw Violation{name() + " was given position " + std::to_string(content.position) + " of shard " +
                    std::to_string(content.shard) + ", expected " +
                    std::to_string(lane_positions_.at(content.shard) - 1)};
  order_->arrived(head.key.sequence);
  ready_.emplace(head.key.sequence, content);
}

void SimTrainer::consume() {
  if (is_stepping_ || is_done_ || recalled_) return;
  switch (order_->next()) {
    case session::RequestOrder::Next::kWait:
      if (!waits_since_) waits_since_ = world_.now();
      return;
    case session::RequestOrder::Next::kEnd:
      ++progress_.epoch;
      progress_.delivered_count = 0;
      progress_.shard_positions.assign(world_.scenario().shard_count, 0);
      progress_.next_shard = 0;
      return begin_epoch();
    case session::RequestOrder::Next::kReady: break;
  }
  waits_since_.reset();
  const uint64_t sequence = order_->ready_sequence();
  order_->delivered(sequence);
  const BatchKey key{progress_.epoch, sequence};
  deliver(ready_.extract(sequence).mapped());
  if (world_.scenario().shard_count == 0) maybe_recall(key);
  is_stepping_ = true;
  world_.at(world_.now() + world_.scenario().step_time, id(), [this] {
    is_stepping_ = false;
    fill();
    carry_out();
    consume();
  });
}

void SimTrainer::deliver(const Content& content) {
  const auto due = expected();
  if (!due || content != *due) {
    const auto spoken = [](const Content& c) {
      return "position " + std::to_string(c.position) + " of shard " + std::to_string(c.shard) + ", epoch " +
             std::to_string(c.epoch) + ", job " + std::to_string(c.job);
    };
    throw Violation{name() + " was given " + spoken(content) + ", expected " + (due ? spoken(*due) : "nothing")};
  }
  ++progress_.delivered_count;
  if (world_.scenario().shard_count == 0) return;
  ++progress_.shard_positions[content.shard];
  progress_.next_shard = (content.shard + 1) % world_.scenario().shard_count;
}

// The next batch that a lone process would give: in turns from every shard that has any left.
std::optional<Content> SimTrainer::expected() const {
  const Scenario& scenario = world_.scenario();
  Content content{.job = job_, .epoch = progress_.epoch};
  if (scenario.shard_count == 0) {
    content.position = progress_.delivered_count;
    return content;
  }
  for (uint32_t tried = 0; tried < scenario.shard_count; ++tried) {
    content.shard = (progress_.next_shard + tried) % scenario.shard_count;
    content.position = progress_.shard_positions[content.shard];
    if (content.position < scenario.batch_count) return content;
  }
  return std::nullopt;
}

void SimTrainer::worker_died(uint64_t worker_id) {
  session_.died(worker_id, world_.now());
  carry_out();
}

void SimTrainer::carry_out() {
  using Kind = session::PoolSession::Command::Kind;
  for (const auto& command : session_.take_commands()) {
    if (command.kind == Kind::kFail) {
      if (!world_.has_blame(job_, command.key, command.death_count))
        throw Violation{to_text(command.key) + " failed after " + std::to_string(command.death_count) +
                        " deaths, which were fewer"};
      if (!is_done_) fail();
      continue;
    }
    if (command.kind == Kind::kRenew) renew(command.worker_id);
    if (command.kind != Kind::kSend) continue;
    WorkerMessage message{.head = command.message, .job = job_};
    if (command.message.is_lane_start) message.lane_position = lane_positions_.at(command.message.lane - 1);
    world_.send(id(), world_.process_of_worker(command.worker_id), message);
  }
}

void SimTrainer::renew(uint64_t worker_id) {
  world_.renew(id(), world_.process_of_worker(worker_id));
  world_.at(world_.now() + std::chrono::milliseconds(3), id(), [this, worker_id] {
    session_.connected(worker_id, world_.now());
    carry_out();
  });
}

void SimTrainer::tick() {
  if (has_left_) return;
  session_.tick(world_.now());
  const Duration timeout = world_.scenario().timeout;
  if (waits_since_ && timeout > Duration(0) && world_.now() - *waits_since_ >= timeout) {
    world_.say(name(), " waits no longer for a batch");
    fail();
    return carry_out();
  }
  if (enrolment_.clock.take(world_.now())) {
    world_.send(id(), kController,
                wire::TrainerReport{.trainer_id = trainer_id_, .job = name(), .worker_count_max = is_done_ ? 0u : 64u});
  }
  carry_out();
  consume();
}

std::optional<Instant> SimTrainer::next_tick() const {
  if (has_left_) return std::nullopt;
  std::optional<Instant> due = earlier(enrolment_.clock.due_at(), session_.next_tick());
  const Duration timeout = world_.scenario().timeout;
  if (waits_since_ && timeout > Duration(0)) due = earlier(due, *waits_since_ + timeout);
  return due;
}

}  // namespace penstock::sim
