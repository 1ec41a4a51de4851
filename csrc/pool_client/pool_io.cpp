// SPDX-License-Identifier: Apache-2.0
#include "pool_client/pool_io.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "base/process.h"
#include "loader/incoming_batch.h"
#include "loader/step_ledger.h"
#include "wire/blob_record.h"

namespace penstock::pool_client {

using net::ConnectionEvent;
using session::PoolSession;
using std::chrono::milliseconds;
using wire::AnswerKind;
using wire::ToTrainer;
using wire::ToWorker;

namespace {

constexpr uint32_t kReportsBetweenPlans = 16;      // before an unchanged plan is repeated
constexpr size_t kMessagesPerTurn = 16;            // of one worker, so that no other waits long
constexpr uint64_t kOpenedBytesInTurn = 16 << 20;  // of all workers; beyond this no further worker is served: ~10 ms
// For a closed connection: twice libzmq's queue limit, since libzmq alternates between it and the next connection.
constexpr size_t kMessagesOfTheDead = 2 * size_t{wire::MessageLimits{}.received_messages_max};
constexpr uint64_t kComparedBytesMax = 32 << 20;       // of a batch that is compared with another worker's: some 10 ms
constexpr auto kReconnectPause = milliseconds(2000);   // after a refusal that is final for libzmq, or no descriptor
constexpr auto kIdleAfter = std::chrono::seconds(2);   // without a request: others may use the workers
constexpr auto kHeldMax = std::chrono::seconds(60);    // without a request in mid-epoch, however long steps take
constexpr auto kPauseShown = std::chrono::seconds(1);  // a shorter pause is over before it is reported
constexpr auto kLinkRateInterval = milliseconds(20);   // interval for recomputing the link's rate
constexpr auto kUnresponsiveCheckInterval = std::chrono::seconds(1);  // interval for detecting silent workers

}  // namespace

PoolIo::PoolIo(const PoolIoOptions& options, const net::RunId& run, PoolDirectory directory, loader::StageChain& stages,
               loader::Inbox& inbox)
    : options_(options),
      run_(run),
      stages_(stages),
      inbox_(inbox),
      memory_(options_.arena_bytes),
      directory_(std::move(directory)),
      session_({.trainer_id = run.id,
                .credit_bytes = options_.credit_bytes,
                .dispatch = {.depth_max = options_.depth, .quick_depth_max = session::kQuickDepth}}) {
  const auto own_key = directory_.own_key();
  own_workers_run_ = own_key ? net::run_id_of(*own_key, run_.secret) : run_.id;
}

// ---- The loop

Result<void> PoolIo::begin() {
  raise_heap_thresholds();  // for the chunks of batches, which ZeroMQ allocates
  auto ready_set = net::ReadySet::open();
  if (!ready_set) return ready_set.error();
  auto context = net::SocketContext::open();
  if (!context) return context.error();
  context_ = std::move(context).value();
  ready_set_ = std::move(ready_set).value();
  auto resolver = net::Resolver::open(options_.lookup);
  if (!resolver) return resolver.error();
  resolver_ = std::move(resolver).value();
  const auto tag = ready_set_->add(resolver_->fd());
  if (!tag) return tag.error();
  resolver_tag_ = tag.value();
  links_ = std::make_unique<WorkerLinks>(*ready_set_);
  if (!options_.gpu_uuid.empty()) job_meter_.open_gpu(options_.gpu_uuid);
  return {};
}

Result<void> PoolIo::serve() {
  if (options_.controller && !controller_) {
    if (auto connected = connect_to_controller(); !connected) return connected;
  }
  if (!options_.controller && session_.known_count() == 0) set_roster(clock_now());
  carry_out();  // the actions that were posted to the loop
  // One time for the whole turn: a worker heard in a turn is not silent at its end, however long the turn takes.
  const Instant now = clock_now();
  // Workers first: a worker's reason for declining must precede the roster that omits the worker.
  serve_workers(now);
  if (auto served = serve_controller(now); !served) return served;
  connect_again(now);
  session_.tick(now);
  carry_out();
  note_standing(now);
  return {};
}

// Workers whose chunks had to wait for the next turn are the first in it.
void PoolIo::serve_workers(Instant now) {
  opened_bytes_ = 0;
  const std::set<uint64_t> ready = links_->take_ready(now);
  const auto first = ready.upper_bound(last_opened_);
  std::vector<uint64_t> in_order(first, ready.end());
  in_order.insert(in_order.end(), ready.begin(), first);
  for (const uint64_t worker_id : in_order) {
    if (opened_bytes_ < kOpenedBytesInTurn) last_opened_ = worker_id;
    serve_worker(worker_id, now);
  }
}

Result<bool> PoolIo::wait(int wake_fd, bool may_sleep) {
  if (wake_tag_ == 0) {
    const auto tag = ready_set_->add(wake_fd);
    if (!tag) return tag.error();
    wake_tag_ = tag.value();
  }
  std::optional<Instant> due = session_.next_tick();
  if (controller_) due = earlier(controller_->due_at(), due);
  due = earlier(due, links_->due_at());
  for (const auto& [worker_id, at] : connect_again_at_) due = earlier(due, at);
  auto timeout = wait_time(due, clock_now());
  // The set is polled even if the loop may not sleep: it reports links that have more messages than one turn takes.
  if (!may_sleep) timeout = milliseconds(0);
  const auto ready = ready_set_->wait(timeout);
  if (!ready) return ready.error();
  bool is_woken = false;
  for (const uint64_t tag : ready.value()) {
    is_woken = is_woken || tag == wake_tag_;
    if (tag == controller_tag_) is_controller_ready_ = true;
    if (tag == resolver_tag_) take_lookups();
    links_->note_ready(tag);
  }
  return is_woken;
}

void PoolIo::take_lookups() {
  for (const std::string& host : resolver_->take_done()) {
    links_->note_looked_up(host);
    if (options_.controller && host == options_.controller->host) is_controller_ready_ = true;
  }
}

// Sends the goodbyes. Sockets are destroyed on the thread that made them.
void PoolIo::end() {
  session_.leave(clock_now());
  carry_out();
  if (controller_) {
    wire::TrainerReport last = make_report();  // includes the costs of the last half second
    last.worker_count_max = 0;
    controller_->deregister(last);
  }
  links_.reset();
  ready_set_.reset();
  controller_.reset();
  resolver_.reset();
  context_.reset();
}

// ---- The controller

Result<void> PoolIo::connect_to_controller() {
  auto controller = ControllerLink::connect(*context_, *resolver_, *options_.controller, options_.keys, clock_now());
  if (!controller) return controller.error();
  const auto tag = ready_set_->add(controller.value()->socket().waitables());
  if (!tag) return tag.error();
  controller_ = std::move(controller).value();
  controller_tag_ = tag.value();
  set_roster(clock_now());
  return {};
}

Result<void> PoolIo::serve_controller(Instant now) {
  if (!controller_) return {};
  if (!std::exchange(is_controller_ready_, false) && now < controller_->due_at()) return {};
  ready_set_->mark_used(controller_tag_);  // even if no wait has reported it
  if (auto received = controller_->receive(now); !received) return received.error();
  if (auto roster = controller_->take_roster()) {
    directory_.set_roster(std::move(roster->entries));
    set_roster(now);
    carry_out();  // first forgets ended links and their notes, then the roster's reasons are noted
    note_declines(*roster);
  }
  if (controller_->report([this] { return make_report(); }, now)) send_plan();
  return {};
}

// Repeated from time to time: a controller may have started since.
void PoolIo::send_plan() {
  const auto plan = plan_.get();
  if (!plan || (plan == reported_plan_ && ++reports_since_plan_ < kReportsBetweenPlans)) return;
  controller_->send_plan(*plan);
  reported_plan_ = plan;
  reports_since_plan_ = 0;
}

void PoolIo::set_roster(Instant now) { session_.set_roster(directory_.entries(), now); }

void PoolIo::lose_own_worker(uint64_t worker_id) {
  directory_.forget_own(worker_id);
  set_roster(clock_now());
}

wire::TrainerReport PoolIo::make_report() {
  const loader::TrainerPace pace = pace_.get();
  const auto ready = pace.stored_count + static_cast<uint32_t>(inbox_.arrival_count());
  const auto nanoseconds = [](Duration time) { return static_cast<uint64_t>(time.count()); };
  const size_t requested_count = session_.dispatch().unanswered_count();
  const Instant now = clock_now();
  return {.trainer_id = run_.id,
          .job = options_.job,
          .worker_count_max = is_idle(now) ? 0 : options_.worker_count_max,
          .queue = {.ready_batches = ready,
                    .wanted_batches = pace.wanted_count,
                    .asked_batches = static_cast<uint32_t>(requested_count),
                    .bytes_in_flight = (ready + requested_count) * memory_.largest_bytes(),
                    .waited_ns = inbox_.counters().wait_ns.value(),
                    .delivered_batches = inbox_.counters().batches.value(),
                    .is_paused = is_paused(pace, now),
                    .step_count = pace.steps.step_count,
                    .stepping_ns = nanoseconds(pace.steps.stepping),
                    .starved_ns = nanoseconds(pace.steps.starved),
                    .paused_ns = nanoseconds(pace.steps.paused),
                    .made_batches = made_.batch_count,
                    .made_ns = nanoseconds(made_.time),
                    .made_cpu_ns = nanoseconds(made_.cpu_time),
                    .made_bytes = made_.bytes,
                    .link_bytes_per_s = static_cast<uint64_t>(std::clamp(link_bytes_per_s_.load(), 0.0, 1e18)),
                    .hedged_batches = session_.dispatch().hedge_count()},
          .steps = loader::StepLedger::totals(inbox_.counters()),
          .costs = job_meter_.totals(),
          .gpu = job_meter_.read_gpu(),
          .about = options_.about,
          .job_kind = options_.job_kind,
          .torch = options_.torch,
          .job_rank = options_.job_rank,
          .secret = run_.secret};
}

bool PoolIo::is_paused(const loader::TrainerPace& pace, Instant now) const {
  if (session_.dispatch().unanswered_count() > 0) return false;
  return !pace.is_in_epoch || now - pace.given_at > std::max<Duration>(pace.pause_min, kPauseShown);
}

// ---- Workers

// Only the first worker with different kernels is reported; the plan and the pool's status show all.
void PoolIo::note_numerics(uint64_t worker_id, const Numerics& numerics) {
  if (options_.numerics == Numerics{}) return;
  kinds_.note(worker_id, numerics);
  const FamilySet differing = differing_families(options_.numerics, numerics);
  const std::string place = format_place(worker_id);
  if (!standing_.note_numerics(worker_id, place, differing)) return;
  tell("the pool has workers with different hardware or libraries than this process: the kernels of worker " + place +
       " return different last bits for " + spoken_families(differing) +
       ". It runs no part of an offloaded model that needs them, but batches whose dataset computes with them depend "
       "on the worker. Use workers with the same kind of CPU and the same libraries if that matters");
}

// A lane's batches depend on each other, and the results of prefixes are compared by the owner of the model.
void PoolIo::compare_kinds(uint64_t worker_id, const wire::PoolAnswer& answer, const loader::Batch& batch,
                           const session::SharedContent& content, Instant now) {
  const BatchKey key = answer.message.key;
  const bool may_be_made_again = content && content->blobs->size() == 1 && !wire::is_recall(key) &&
                                 (answer.flags & (wire::kBatchRaises | wire::kBatchThreadsDrew)) == 0;
  if (batch.remote_error() || !may_be_made_again || answer.payload_bytes > kComparedBytesMax) return;
  const auto other = kinds_.choose(worker_id, [this](uint64_t id) { return session_.is_open(id); });
  const auto digest = other ? batch.content() : std::nullopt;
  if (!digest) return;
  kinds_.begin(wire::recall_of(key), worker_id, format_place(worker_id), *digest);
  session_.ask(wire::recall_of(key), wire::kNoLane, now, content, other);
}

void PoolIo::note_compared(uint64_t worker_id, const loader::Batch& batch) {
  const auto digest = batch.remote_error() ? std::nullopt : batch.content();
  if (!digest) return kinds_.give_up();
  if (auto news = kinds_.finish(worker_id, format_place(worker_id), *digest)) tell(std::move(*news));
}

void PoolIo::connect(uint64_t worker_id) {
  connect_again_at_.erase(worker_id);
  const auto place = directory_.find(worker_id);
  if (!place) return;
  const auto& endpoint = place->endpoint;
  if (!endpoint) return tell("worker " + format_id(worker_id) + " cannot be used: " + endpoint.error().message);
  auto socket =
      place->key ? net::ClientSocket::connect(*context_, *resolver_, endpoint.value(), place->keys.own(), *place->key)
                 : net::ClientSocket::connect(*context_, *resolver_, endpoint.value(), place->keys, net::Role::kWorker);
  const auto opened = socket ? links_->open(worker_id, endpoint.value(), std::move(socket).value()) : socket.error();
  if (!opened) {
    // Most likely no descriptor was left. The session requests a connection only once, so the retry happens here.
    connect_again_at_[worker_id] = clock_now() + kReconnectPause;
    const std::string reason = "connecting to " + endpoint.value().text() + " failed: " + opened.error().message;
    if (standing_.note_refusal(worker_id, reason))
      tell("worker " + format_id(worker_id) + " cannot be used yet: " + reason);
    return;
  }
  standing_.forget_refusal(worker_id);
}

void PoolIo::connect_again(Instant now) {
  std::vector<uint64_t> worker_ids;
  for (const auto& [worker_id, at] : connect_again_at_) {
    if (now >= at) worker_ids.push_back(worker_id);
  }
  for (const uint64_t worker_id : worker_ids) connect(worker_id);
}

void PoolIo::serve_worker(uint64_t worker_id, Instant now) {
  if (const WorkerLink* link = links_->find(worker_id)) links_->mark_used(*link);
  serve_data(worker_id, now);
  receive_from(worker_id, kMessagesPerTurn, now);
  take_waiting(worker_id, now);  // an answer that is no longer awaited must not block others
  while (WorkerLink* link = links_->find(worker_id)) {
    if (link->reconnect_at && now >= *link->reconnect_at) {
      link->reconnect_at.reset();
      if (auto begun = link->socket().reconnect(); !begun) link->reconnect_at = now + kReconnectPause;
    }
    const auto event = link->socket().try_event();
    if (!event) return links_->note_served(worker_id);
    // Its earlier messages count: they are received first.
    if (event->kind == ConnectionEvent::Kind::kDisconnected) receive_from(worker_id, kMessagesOfTheDead, now);
    if (links_->find(worker_id) == link) take_event(worker_id, *link, *event, now);
    carry_out();
  }
}

void PoolIo::take_event(uint64_t worker_id, WorkerLink& link, const ConnectionEvent& event, Instant now) {
  switch (event.kind) {
    case ConnectionEvent::Kind::kConnected: return session_.connected(worker_id, now);
    case ConnectionEvent::Kind::kDisconnected:
      links_->end_link(worker_id);
      link.data_missed_at.reset();
      lost_at_ = link.endpoint().text();
      return session_.died(worker_id, now);
    case ConnectionEvent::Kind::kRefused: break;
  }
  if (event.is_final) link.reconnect_at = now + kReconnectPause;
  if (!event.is_final || std::exchange(link.is_problem_reported, true)) return;
  tell("worker " + format_id(worker_id) + " cannot be used: " + event.reason);
}

void PoolIo::receive_from(uint64_t worker_id, size_t message_count_max, Instant now) {
  net::ClientReceipt receipt;
  for (size_t count = 0; count < message_count_max; ++count) {
    WorkerLink* link = links_->find(worker_id);
    if (link == nullptr) return;
    auto received = link->socket().try_receive(receipt);
    if (!received) return stages_.fail(0, received.error());
    if (!received.value()) return;
    if (receipt.offence.empty()) {
      take_message(worker_id, *link, receipt.parts, now);
    } else {
      refuse_message(worker_id, *link, "it sent a message that workers do not send: " + receipt.offence, now);
    }
    carry_out();
  }
}

void PoolIo::complain(uint64_t worker_id, WorkerLink& link, const std::string& what) {
  if (std::exchange(link.is_problem_reported, true)) return;
  tell("worker " + format_id(worker_id) + " at " + link.endpoint().text() + " cannot be used: " + what);
}

// A message that cannot be read may be the answer to a request.
void PoolIo::refuse_message(uint64_t worker_id, WorkerLink& link, const std::string& what, Instant now) {
  if (!session_.distrust(worker_id, std::nullopt, what, now)) complain(worker_id, link, what);
}

void PoolIo::note_distrust(const PoolSession::Command& command) {
  const std::string hint = format_hint(command.worker_id);
  if (command.asked) wrong_answers_[*command.asked] = {format_place(command.worker_id), command.reason + hint};
  WorkerLink* link = links_->find(command.worker_id);
  if (link == nullptr) return;
  const std::string place = format_place(command.worker_id);
  links_->end_link(command.worker_id);
  link->data_missed_at.reset();
  if (command.is_dismissed) {
    const std::string news = "receives no more requests, because " + command.reason;
    standing_.note_refusal(command.worker_id, news);
    return tell("worker " + place + " " + news + "; other workers make its batches" + hint);
  }
  if (link->is_problem_reported || std::exchange(link->is_fault_reported, true)) return;
  tell("worker " + place + " is being reconnected, because " + command.reason);
}

// The link has ended with the process, and no more of its chunks follow.
void PoolIo::note_death(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer, bool is_awaited) {
  links_->end_link(worker_id);
  link.data_missed_at.reset();
  lost_at_ = link.endpoint().text();
  if (is_awaited) reported_ends_[answer.message.key] = loader::format_end(answer.body);
}

loader::DeathTraces PoolIo::traces_of(BatchKey key) const {
  const auto told = reported_ends_.find(key);
  return {.lost_at = lost_at_, .last_end = told == reported_ends_.end() ? "" : told->second};
}

std::unique_ptr<loader::Batch> PoolIo::error_in_place(const PoolSession::Command& command) {
  const loader::DeathTraces traces = traces_of(command.key);
  reported_ends_.erase(command.key);
  const auto wrong = wrong_answers_.extract(command.key);
  if (wrong.empty()) return loader::error_of_deaths(command.key, *command.content, command.death_count, traces);
  return loader::error_of_wrong_answers(command.key, wrong.mapped().place, wrong.mapped().reason, command.death_count);
}

void PoolIo::take_message(uint64_t worker_id, WorkerLink& link, std::span<net::ReceivedPart> parts, Instant now) {
  const auto first = parts.front().bytes();
  if (wire::is_blob_message(first) && parts.size() <= 2) {
    const auto message = wire::parse_blob_message(first, parts.size() == 2 ? parts[1].bytes().size() : 0);
    if (!message) return refuse_message(worker_id, link, message.error().message, now);
    const auto* request = std::get_if<wire::BlobRequest>(&message.value());
    if (request == nullptr) return refuse_message(worker_id, link, "it sent a blob, but only trainers send blobs", now);
    return link.hand_out(*request, blobs_.find(request->id));
  }
  if (parts.size() > 1)
    return refuse_message(worker_id, link, "it sent " + std::to_string(parts.size()) + " parts, but the maximum is one",
                          now);
  take_answer(worker_id, link, std::move(parts.front()), now);
}

// A refusal, a broken link and the death of the worker's process are processed immediately: in these cases the chunks
// of a waiting answer may never arrive. All other messages keep their order behind the waiting answer.
void PoolIo::take_answer(uint64_t worker_id, WorkerLink& link, net::ReceivedPart part, Instant now) {
  const auto parsed = wire::parse_to_trainer(part.bytes());
  if (!parsed) return refuse_message(worker_id, link, parsed.error().message, now);
  const wire::PoolAnswer& answer = parsed.value();
  if (answer.worker_id != worker_id) {  // another worker uses this address now, unless this one has answered a hello
    if (session_.is_open(worker_id))
      refuse_message(worker_id, link, "it sent a message in the name of worker " + format_id(answer.worker_id), now);
    return;
  }
  if (!std::exchange(link.has_responded, true)) standing_.forget_refusal(worker_id);
  note_message(worker_id, link, answer);
  const bool ends_link = answer.message.stamp == 0 || answer.message.kind == ToTrainer::Kind::kDied;
  const bool has_turn = ends_link || (!link.has_waiting() && !waits_for_pieces(link, answer));
  if (has_turn) return take_answer_in_turn(worker_id, link, answer, now);
  const bool is_of_link = session_.is_in_force(worker_id, answer.message.link);
  if (!link.add_waiting(std::move(part))) return lose_track(worker_id, answer.message.link, now);
  // Without a connection to the worker's data port the chunks cannot arrive: a network fault, and reported as one.
  if (is_of_link && !link.data_missed_at) session_.answer_waits(worker_id);
}

bool PoolIo::waits_for_pieces(WorkerLink& link, const wire::PoolAnswer& answer) const {
  return answer.kind == AnswerKind::kBatch && !answer.place && link.data() &&
         answer.message.link == link.data()->number() && session_.dispatch().is_unanswered(answer.message.key) &&
         !link.data()->has_whole(answer.message.key);
}

void PoolIo::take_waiting(uint64_t worker_id, Instant now) {
  for (;;) {
    WorkerLink* link = links_->find(worker_id);
    if (link == nullptr || !link->has_waiting()) return;
    const auto answer = wire::parse_to_trainer(link->first_waiting().bytes());  // parsed before, so valid
    if (waits_for_pieces(*link, answer.value())) return;
    const net::ReceivedPart part = std::move(link->first_waiting());
    link->drop_first_waiting();
    take_answer_in_turn(worker_id, *link, wire::parse_to_trainer(part.bytes()).value(), now);
    carry_out();
  }
}

void PoolIo::take_answer_in_turn(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer, Instant now) {
  const ToTrainer& message = answer.message;
  const bool is_in_force = session_.is_in_force(worker_id, message.link);
  const bool is_refusal = message.kind == ToTrainer::Kind::kRefused || message.kind == ToTrainer::Kind::kDeclined;
  // A greeting is answered by one refusal; a worker's further refusals are ignored.
  if (is_refusal && is_in_force) {
    note_refusal(worker_id, answer);
    link.is_refused = message.kind == ToTrainer::Kind::kRefused;
  }
  if (answer.grant && is_in_force) {
    if (std::exchange(link.is_refused, false)) standing_.forget_refusal(worker_id);
    note_numerics(worker_id, answer.grant->numerics);
    connect_data(worker_id, link, *answer.grant, now);
  }
  const bool is_awaited = session_.dispatch().is_unanswered(message.key);
  const wire::Lane lane = is_awaited ? session_.dispatch().lane_of(message.key) : wire::kNoLane;
  std::optional<loader::IncomingBatch> whole;
  if (answer.place && is_in_force) {  // a batch that is not awaited releases its slab
    auto taken = take_slab(link, answer);
    if (!taken) {
      link.is_handover_given_up = true;
      tell("worker " + format_place(worker_id) +
           " now sends its batches over a socket, because its memory cannot be used: " + taken.error().message);
      return lose_track(worker_id, message.link, now);
    }
    whole.emplace(std::move(taken).value());
  } else if (answer.kind == AnswerKind::kBatch && is_awaited && is_in_force) {
    if (link.data()) whole = link.data()->take_whole(message.key);
    if (!whole || whole->payload_bytes() != answer.payload_bytes) {
      session_.distrust(worker_id, message.key, "the chunks of a batch do not match its answer", now,
                        PoolSession::Wrong::kMaybeInFlight);
      return;
    }
  }
  const bool has_crossed = whole && !answer.place;
  const Instant came_at = clock_now();
  const session::SharedContent content = whole ? session_.dispatch().content_of(message.key) : nullptr;
  std::unique_ptr<loader::Batch> batch;  // of an answer that may count
  if (is_awaited && is_in_force && message.kind == ToTrainer::Kind::kAnswer) {
    auto read = read_answer(worker_id, answer, lane, std::move(whole));
    if (!read) {
      session_.distrust(worker_id, message.key, read.error().message, now);
      return;
    }
    batch = std::move(read).value();
  }
  if (has_crossed) {
    const bool is_narrow = batch && !batch->remote_error() && batch->is_narrow();
    note_crossing(worker_id, answer, is_narrow, came_at);
  }
  const bool counts = session_.receive(worker_id, message, answer.payload_bytes, now);
  const bool has_ended = is_in_force && !session_.is_in_force(worker_id, message.link);
  if (message.kind == ToTrainer::Kind::kDied && has_ended) note_death(worker_id, link, answer, is_awaited);
  if (!counts) return;
  was_served_ = true;
  wrong_answers_.erase(message.key);
  reported_ends_.erase(message.key);
  note_made(worker_id, answer, content.get());
  if (answer.kind == AnswerKind::kEnd) return end_lane(message.key, lane, now);
  if (lane != wire::kNoLane) lanes_.answered(lane, answer.state);
  if (kinds_.awaits(message.key)) return note_compared(worker_id, *batch);
  if (lane == wire::kNoLane) compare_kinds(worker_id, answer, *batch, content, now);
  std::optional<loader::NarrowArrival> narrow;
  if (!batch->remote_error() && batch->is_narrow()) narrow = loader::NarrowArrival{.place = format_place(worker_id)};
  batch->times().worker_id = worker_id;
  batch->times().made_at =
      std::min(link_meter_.written_at(worker_id, Duration(answer.sent_at)).value_or(clock_now()), clock_now());
  if (batch->withheld_bytes() > 0) batch->set_origin({.request = content, .worker_id = worker_id});
  deliver(message.key, std::move(batch), std::move(narrow));
}

bool PoolIo::has_other_dataset(const wire::PoolAnswer& answer) const {
  return answer.kind == AnswerKind::kBatch && !wire::is_recall(answer.message.key) &&
         options_.reported_size.size != wire::kSizeUnknown && answer.dataset_size != options_.reported_size.size;
}

// It is unknown which of two workers has the right one.
std::unique_ptr<loader::Batch> PoolIo::error_of_dataset(const wire::PoolAnswer& answer,
                                                        const std::string& place) const {
  return loader::error_in_batch(answer.message.key, place,
                                "its dataset has " + loader::format_dataset_size(answer.dataset_size) +
                                    ", but the dataset of worker " + options_.reported_size.by +
                                    ", which determines this epoch, has " +
                                    loader::format_dataset_size(options_.reported_size.size) +
                                    "; use the same files and the same version of the dataset on all workers");
}

// The batch of an answer to a request of this lane, or the error in its place; null for the end of a lane.
Result<std::unique_ptr<loader::Batch>> PoolIo::read_answer(uint64_t worker_id, const wire::PoolAnswer& answer,
                                                           wire::Lane lane,
                                                           std::optional<loader::IncomingBatch> whole) {
  if (answer.kind == AnswerKind::kEnd) {
    if (lane != wire::kNoLane) return std::unique_ptr<loader::Batch>();
    return Fault{Errc::kMalformed, "it reported the end of a shard when it was asked for " +
                                       wire::to_text(answer.message.key) + ", which belongs to no shard"};
  }
  if (has_other_dataset(answer)) return error_of_dataset(answer, format_place(worker_id));
  const bool is_received = whole && !answer.place;
  auto batch = loader::batch_of(answer, std::move(whole), format_id(worker_id),
                                {.allow_pickle = options_.allow_pickle, .is_python = options_.is_python});
  if (batch && batch.value()->withheld_bytes() > 0 && !may_withhold(answer.message.key))
    return Fault{Errc::kMalformed, "it omitted tensors of a batch although its request does not permit it"};
  if (batch && is_received) memory_.note_received(answer.payload_bytes);  // after reading: an error may claim any size
  if (batch || batch.error().code != Errc::kNoMemory) return batch;
  return loader::error_of_damage(answer.message.key, format_place(worker_id), batch.error());
}

bool PoolIo::may_withhold(BatchKey key) const {
  const session::SharedContent content = session_.dispatch().content_of(key);
  if (!content || content->blobs->empty()) return false;
  const auto last = blobs_.find(content->blobs->back());
  return !last || wire::is_shipment(std::as_bytes(std::span(*last)));
}

void PoolIo::note_made(uint64_t worker_id, wire::PoolAnswer answer, const session::RequestContent* content) {
  if (answer.kind != AnswerKind::kBatch) return;
  if (content != nullptr && content->request.index_kind == wire::IndexKind::kIntegers)
    answer.sample_count =
        static_cast<uint32_t>(std::min<uint64_t>(answer.sample_count, content->indices.size() / sizeof(int64_t)));
  if (!directory_.is_own(worker_id)) job_meter_.note_batch(answer);
  const Duration time = answer.fetch_time * Duration(wire::kTimeUnit);
  ++made_.batch_count;
  made_.time += time;
  made_.cpu_time += time * answer.cpu_share / wire::kCpuShareUnit;
  if (!answer.place) made_.bytes += answer.payload_bytes;
}

// ---- The link

void PoolIo::note_message(uint64_t worker_id, WorkerLink& link, const wire::PoolAnswer& answer) {
  if (!session_.is_in_force(worker_id, answer.message.link)) return;
  if (answer.message.kind == ToTrainer::Kind::kWelcome) links_->forget_resting(worker_id);
  const Instant now = clock_now();
  // Own workers run on the trainer's machine, whose costs are not the pool's.
  if (!directory_.is_own(worker_id)) job_meter_.note_message(worker_id, answer, now);
  link_meter_.note_message(worker_id, Duration(answer.sent_at), now);
  if (answer.message.kind != ToTrainer::Kind::kPong || !link.pinged_at) return;
  link_meter_.note_round_trip(now - *std::exchange(link.pinged_at, std::nullopt));
  round_trip_s_.store(std::chrono::duration<double>(*link_meter_.round_trip()).count());
}

void PoolIo::note_crossing(uint64_t worker_id, const wire::PoolAnswer& answer, bool is_narrow, Instant now) {
  link_meter_.note_batch(worker_id, Duration(answer.sent_at), answer.payload_bytes, now, is_narrow);
  if (now - link_rate_updated_at_ < kLinkRateInterval) return;
  link_rate_updated_at_ = now;
  if (const auto rate = link_meter_.bytes_per_s(std::max<size_t>(1, session_.open_count())))
    link_bytes_per_s_.store(*rate);
}

// ---- The chunks of batches

void PoolIo::begin_link(uint64_t worker_id, uint32_t number, wire::SealOffer& offer) {
  const auto nonce = net::draw_seal_nonce();
  if (!nonce) return stages_.fail(0, nonce.error());
  offer = {.ciphers = options_.ciphers, .nonce = nonce.value()};
  links_->begin_link(worker_id, {.trainer_id = run_id_with(worker_id), .worker_id = worker_id, .link = number}, offer);
  connect_handover(worker_id, *links_->find(worker_id), number);
}

// The worker looks for this connection when it receives the hello, so it must be made before.
void PoolIo::connect_handover(uint64_t worker_id, WorkerLink& link, uint32_t number) {
  const auto place = directory_.find(worker_id);
  if (!place || place->handover.empty() || link.is_handover_given_up) return;
  auto channel = shm::Channel::connect(place->handover);
  const wire::HandoverHello hello{.trainer_id = run_id_with(worker_id), .link = number};
  const auto sent = channel ? channel.value().send_record(hello) : channel.error();
  if (!sent && sent.error().code == Errc::kClosed) return;  // the worker has died, which its other socket reports
  if (!sent) {
    link.is_handover_given_up = true;
    return tell("worker " + format_place(worker_id) + " sends its batches over a socket: " + sent.error().message);
  }
  link.passed().emplace(std::move(channel).value(), passed_views_, inbox_.counters().arenas);
}

Result<loader::IncomingBatch> PoolIo::take_slab(WorkerLink& link, const wire::PoolAnswer& answer) {
  if (!link.passed()) return Fault{Errc::kMalformed, "it names a slab on a connection without shared memory"};
  auto lease = link.passed()->lease(*answer.place);
  if (!lease) return lease.error();
  if (answer.payload_bytes > lease.value()->view().slab_bytes())
    return Fault{Errc::kMalformed, "it names a batch that is larger than its slab"};
  const uint64_t slab_bytes = lease.value()->view().slab_bytes();
  return loader::IncomingBatch({.lease = std::move(lease).value(),
                                .is_transient = answer.place->is_transient,
                                .backed_bytes = std::min(answer.place->slab_bytes, slab_bytes)},
                               answer.payload_bytes);
}

void PoolIo::connect_data(uint64_t worker_id, WorkerLink& link, const wire::SealGrant& grant, Instant now) {
  if (!link.data() || link.data()->is_granted()) return;  // a repeated welcome
  if (auto connected = links_->connect_data(worker_id, *context_, *resolver_, grant); !connected)
    complain(worker_id, link, connected.error().message);
  if (!link.data_missed_at) link.data_missed_at = now;
}

void PoolIo::serve_data(uint64_t worker_id, Instant now) {
  if (opened_bytes_ < kOpenedBytesInTurn) receive_pieces(worker_id, kMessagesPerTurn, now);
  for (;;) {
    WorkerLink* link = links_->find(worker_id);
    if (link == nullptr || !link->data() || !link->data()->is_granted()) return;
    const uint32_t number = link->data()->number();
    const auto event = link->data()->client().try_event();
    if (!event) return;
    switch (event->kind) {
      case ConnectionEvent::Kind::kConnected: link->data_missed_at.reset(); break;
      case ConnectionEvent::Kind::kRefused: complain(worker_id, *link, event->reason); break;
      case ConnectionEvent::Kind::kDisconnected:
        // Its earlier chunks count; libzmq queues fewer of them than this limit.
        receive_pieces(worker_id, kMessagesPerTurn, now);
        lose_track(worker_id, number, now);
    }
  }
}

void PoolIo::receive_pieces(uint64_t worker_id, size_t piece_count_max, Instant now) {
  const auto is_awaited = [this](BatchKey key) { return session_.dispatch().is_unanswered(key); };
  for (size_t count = 0; count < piece_count_max; ++count) {
    WorkerLink* link = links_->find(worker_id);
    if (link == nullptr || !link->data() || !link->data()->is_granted()) return;
    const uint32_t number = link->data()->number();
    const auto outcome = link->data()->take_piece(memory_, is_awaited);
    if (outcome == DataLink::Outcome::kNothing) return;
    if (outcome == DataLink::Outcome::kPiece) {
      opened_bytes_ += link->data()->client().piece().size();
      session_.heard(worker_id, number, now);
      take_waiting(worker_id, now);
      continue;
    }
    if (!session_.is_in_force(worker_id, number)) return;
    session_.distrust(worker_id, std::nullopt, "a chunk of a batch is invalid: " + link->data()->fault(), now,
                      PoolSession::Wrong::kMaybeInFlight);
    return carry_out();
  }
}

// From now on messages on the link are ignored, even while the next link has to wait.
void PoolIo::lose_track(uint64_t worker_id, uint32_t number, Instant now) {
  if (!session_.is_in_force(worker_id, number)) return;
  links_->end_link(worker_id);
  session_.lose_track(worker_id, number, now);
  carry_out();
}

void PoolIo::end_lane(BatchKey key, wire::Lane lane, Instant now) {
  ended_lanes_.insert(lane);
  session_.end_lane(key.epoch, lane, now);
  answered_at_ = now;
  if (inbox_.is_stale(key.epoch)) return;
  stages_.arrive(
      {.kind = loader::Arrival::Kind::kEnd, .epoch = key.epoch, .sequence = key.sequence, .batch = {}, .error = {}});
}

// A trainer that has all its batches and takes long steps still needs its workers.
bool PoolIo::is_idle(Instant now) const {
  if (session_.dispatch().unanswered_count() > 0 || now - answered_at_ < kIdleAfter) return false;
  const loader::TrainerPace pace = pace_.get();
  return !pace.is_in_epoch || now - pace.given_at > std::clamp<Duration>(pace.pause_min, kIdleAfter, kHeldMax);
}

void PoolIo::deliver(BatchKey key, std::unique_ptr<loader::Batch> batch, std::optional<loader::NarrowArrival> narrow) {
  if (kinds_.awaits(key)) return kinds_.give_up();  // the error in place of a comparison batch, which has no consumer
  answered_at_ = clock_now();
  if (!wire::is_recall(key) && inbox_.is_stale(key.epoch)) return inbox_.counters().stale_batches.add(1);
  stages_.arrive({.kind = loader::Arrival::Kind::kBatch,
                  .epoch = key.epoch,
                  .sequence = key.sequence,
                  .batch = std::move(batch),
                  .narrow = std::move(narrow),
                  .error = {}});
}

std::string PoolIo::format_place(uint64_t worker_id) const {
  const WorkerLink* link = links_->find(worker_id);
  return format_id(worker_id) + (link == nullptr ? "" : " at " + link->endpoint().text());
}

std::string PoolIo::format_hint(uint64_t worker_id) const {
  if (directory_.is_own(worker_id)) return "";
  return "; remove it from the pool (penstock drain " + format_id(worker_id) +
         "), and check that it has the same version of penstock as the trainer";
}

void PoolIo::note_refusal(uint64_t worker_id, const wire::PoolAnswer& answer) {
  const std::string reason(loader::text_of(answer.body));
  if (reason.empty()) return;
  if (standing_.note_refusal(worker_id, reason) && answer.message.kind == ToTrainer::Kind::kDeclined)
    warn_of_decline(format_place(worker_id), reason);
}

void PoolIo::warn_of_decline(const std::string& worker, const std::string& reason) {
  tell("worker " + worker + " does not work for this trainer: " + reason);
}

// If every worker has declined, no batch can arrive unless others join. That is an error for a job that no worker has
// run yet. A job that was run waits, since its worker may return.
void PoolIo::note_declines(const wire::TrainerRoster& roster) {
  standing_.note_pool(roster.pool_count, roster.declined_count);
  for (const auto& [worker_id, reason] : roster.declines) {
    if (standing_.note_reported_refusal(worker_id, reason)) warn_of_decline(format_id(worker_id), reason);
  }
  const bool is_hopeless = roster.declined_count > 0 && roster.declined_count == roster.pool_count &&
                           session_.declined_count() == session_.known_count();
  if (!std::exchange(is_hopeless_, is_hopeless) && is_hopeless) {
    const std::string news =
        "no worker of the pool can run this job: " + standing_.describe_declined(controller_text());
    if (was_served_) return tell(news + "; training continues when a worker joins that can");
    stages_.fail(0, {Errc::kFailed, news});
  }
}

// ---- Requests

void PoolIo::begin_epoch(uint32_t epoch, std::map<wire::Lane, LanePlaces::Place> lanes) {
  const Instant now = clock_now();
  session_.forget_other_epochs(epoch, now);
  for (const wire::Lane lane : ended_lanes_) session_.end_lane(epoch_, lane, now);
  ended_lanes_.clear();
  std::erase_if(wrong_answers_, [](const auto& item) { return !wire::is_recall(item.first); });
  std::erase_if(reported_ends_, [](const auto& item) { return !wire::is_recall(item.first); });
  lanes_.begin(std::move(lanes));
  epoch_ = epoch;
}

void PoolIo::ask(session::SharedContent content) {
  const BatchKey key{.epoch = content->request.epoch, .sequence = content->request.sequence};
  const wire::Lane lane = options_.is_iterable ? content->request.shard_id + 1 : wire::kNoLane;
  if (key.epoch != epoch_ || ended_lanes_.contains(lane)) return;
  const uint64_t bytes =
      content->indices.size() + content->seeds->size() + content->blobs->size() * sizeof(wire::BlobId);
  if (bytes > wire::kPoolBodyBytesMax / 2) return deliver(key, loader::error_of_indices(key, content->indices.size()));
  const Instant now = clock_now();
  if (controller_ && is_idle(now)) controller_->hurry(now);
  session_.ask(key, lane, now, std::move(content));
}

// Repeats the request that the batch answered: its epoch may be over, and its blobs are the original ones.
void PoolIo::recall(const loader::Batch::Origin& origin) {
  const Instant now = clock_now();
  const wire::BatchRequest& request = origin.request->request;
  const BatchKey key = wire::recall_of({.epoch = request.epoch, .sequence = request.sequence});
  if (session_.dispatch().is_unanswered(key)) return;
  if (controller_ && is_idle(now)) controller_->hurry(now);
  session_.ask(key, wire::kNoLane, now, origin.request, origin.worker_id);
}

void PoolIo::forget_recall(const loader::Batch::Origin& origin) {
  const wire::BatchRequest& request = origin.request->request;
  const BatchKey key = wire::recall_of({.epoch = request.epoch, .sequence = request.sequence});
  wrong_answers_.erase(key);
  reported_ends_.erase(key);
  session_.forget(key, clock_now());
}

void PoolIo::carry_out() {
  using Kind = PoolSession::Command::Kind;
  for (auto commands = session_.take_commands(); !commands.empty(); commands = session_.take_commands()) {
    for (const PoolSession::Command& command : commands) {
      switch (command.kind) {
        case Kind::kConnect: connect(command.worker_id); break;
        case Kind::kDisconnect:
          connect_again_at_.erase(command.worker_id);
          kinds_.forget(command.worker_id);
          link_meter_.forget(command.worker_id);
          job_meter_.note_parting(command.worker_id, clock_now());
          if (const WorkerLink* link = links_->find(command.worker_id); link != nullptr && !link->has_responded)
            standing_.forget_refusal(command.worker_id);  // its silence is no longer relevant
          disconnect(command);
          break;
        case Kind::kRenew: links_->renew(command.worker_id); break;
        case Kind::kSend: send(command); break;
        case Kind::kFail: deliver(command.key, error_in_place(command)); break;
        case Kind::kDistrust: note_distrust(command); break;
      }
    }
  }
}

void PoolIo::disconnect(const PoolSession::Command& command) {
  // A goodbye may still be queued.
  if (!command.rests) return links_->close(command.worker_id, net::kClosingLinger);
  wire::PoolRequest goodbye{.message = command.message};
  goodbye.message.trainer_id = run_id_with(command.worker_id);
  links_->rest(command.worker_id, wire::write_to_worker(goodbye), clock_now());
}

void PoolIo::send(const PoolSession::Command& command) {
  WorkerLink* link = links_->find(command.worker_id);
  if (link == nullptr) return;
  wire::PoolRequest request{.message = command.message};
  request.message.trainer_id = run_id_with(command.worker_id);
  if (command.message.kind == ToWorker::Kind::kCancel && link->data()) link->data()->forget(command.message.key);
  if (command.message.kind == ToWorker::Kind::kHello) {
    begin_link(command.worker_id, command.message.link, request.offer.emplace());
    request.secret = run_.secret;
  }
  if (command.message.kind == ToWorker::Kind::kPing && !link->pinged_at) link->pinged_at = clock_now();
  std::vector<std::byte> state;
  session::SharedContent content;
  if (command.message.kind == ToWorker::Kind::kRequest) {
    content = session_.dispatch().content_of(command.message.key);
    if (!content) return;  // forgotten meanwhile
    if (command.message.is_lane_start) state = lanes_.start_of(command.message.lane);
    request.index_kind = content->request.index_kind;
    request.epoch_seed = content->request.epoch_seed;
    request.first_place = content->request.first_place;
    const double rate = link_meter_.is_outdated() ? 0 : link_bytes_per_s_.load();
    request.link_mb_per_s = static_cast<uint16_t>(std::clamp(std::round(rate / 1e6), 0.0, 65535.0));
    request.indices = content->indices;
    request.seeds = *content->seeds;
    request.state = state;
    request.blobs = *content->blobs;
  }
  // A message that is lost leaves a gap in the link's stamps, which the worker notices.
  auto bytes = wire::write_to_worker(request);
  links_->send(command.worker_id, bytes);
  if (request.offer) wipe(bytes);
}

// ---- Messages to the user

void PoolIo::note_standing(Instant now) {
  const size_t open_count = session_.open_count();
  const auto before = worker_count_.exchange(static_cast<uint32_t>(open_count));
  if (open_count > before) stages_.arrive({.kind = loader::Arrival::Kind::kGrown, .batch = {}, .error = {}});
  if (open_count == 0 || before == 0) standing_.note_deaths(open_count == 0 ? deaths_of_last_workers() : "");
  note_controller(now, open_count);
  if (now < silent_links_at_) return;
  silent_links_at_ = now + kUnresponsiveCheckInterval;
  links_->end_rest(now - kRestMax);
  for (const uint64_t worker_id : links_->silent_since(now - kUnresponsiveAfter)) {
    const std::string reason = describe_unresponsive(*links_->find(worker_id));
    if (standing_.note_refusal(worker_id, reason)) tell("worker " + format_id(worker_id) + " " + reason);
  }
  for (const uint64_t worker_id : links_->without_data_since(now - kUnresponsiveAfter)) {
    const std::string reason = describe_missing_data(*links_->find(worker_id));
    if (standing_.note_refusal(worker_id, reason)) tell("worker " + format_id(worker_id) + " " + reason);
  }
}

std::string PoolIo::deaths_of_last_workers() const {
  const auto deadliest = session_.dispatch().deadliest();
  if (!deadliest || wrong_answers_.contains(deadliest->first)) return "";
  const session::SharedContent content = session_.dispatch().content_of(deadliest->first);
  return content ? loader::format_deaths(deadliest->first, *content, deadliest->second, traces_of(deadliest->first))
                 : "";
}

void PoolIo::note_controller(Instant now, size_t open_count) {
  if (!controller_) {
    standing_.note({}, session_.known_count(), open_count);
    const bool is_hopeless = session_.known_count() > 0 && session_.declined_count() == session_.known_count();
    if (!std::exchange(is_hopeless_, is_hopeless) && is_hopeless)
      stages_.fail(0, {Errc::kFailed, "no worker can run this job: " + standing_.describe("")});
    return;
  }
  const auto time_since_answer = controller_->time_since_answer(now);
  if (controller_->has_answered() && time_since_answer >= kUnresponsiveAfter) {
    if (!std::exchange(is_unresponsive_logged_, true))
      tell("the controller at " + controller_text() + " has not answered for " +
           std::to_string(std::chrono::duration_cast<std::chrono::seconds>(time_since_answer).count()) +
           " s; training continues with its current workers, and new ones join when a controller is available again");
  } else {
    is_unresponsive_logged_ = false;
  }
  standing_.note({.has_answered = controller_->has_answered(),
                  .trouble = controller_->trouble(),
                  .lookup_failure = controller_->socket().lookup_failure(),
                  .time_since_answer = time_since_answer},
                 session_.known_count(), open_count);
}

std::string PoolIo::describe_missing_data(WorkerLink& link) {
  const std::string where = link.data() && link.data()->is_granted() ? link.data()->endpoint().text() : "its data port";
  return "answers at " + link.endpoint().text() + ", but no data arrives from " + where +
         ", from which its batches are sent; check that this machine can reach it there (firewalls, penstock worker "
         "--data-bind, --data-advertise)";
}

std::string PoolIo::describe_unresponsive(WorkerLink& link) {
  const std::string& failure = link.socket().lookup_failure();
  if (!failure.empty())
    return "cannot be resolved: no address is known for " + link.endpoint().host + " (" + failure +
           "); have it advertise an address (penstock worker --advertise)";
  return "has not answered at " + link.endpoint().text() +
         "; check that this machine can reach it there (firewalls, penstock worker --advertise)";
}

void PoolIo::tell(std::string news) {
  stages_.arrive({.kind = loader::Arrival::Kind::kNews, .batch = {}, .error = Fault{Errc::kFailed, std::move(news)}});
}

}  // namespace penstock::pool_client
